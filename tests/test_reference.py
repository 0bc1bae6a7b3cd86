"""Tests of effgpu.reference: files that hold all or nothing, and are refused by name when they are something else."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effgpu import reference
from effgpu.ablation import Ablation
from effgpu.comparison import Comparison
from effgpu.reference import FORMAT, load, save, stored, write_whole


@pytest.fixture
def result(make_measurement):
    return Comparison("some", (make_measurement("a"), make_measurement("b", 0.01, items=8)))


@pytest.fixture
def make_stored(tmp_path, monkeypatch, make_measurement, make_gpu, cpu):
    """A function that stores a result in a folder that stands in for effgpu/reference/."""
    monkeypatch.setattr(reference, "STORED", tmp_path)
    reference._load_once.cache_clear()

    def store(file, *names, device=None):
        device = device or make_gpu(file)
        results = [Comparison(name, (make_measurement("a", device=device),)) for name in names]
        return save(results, tmp_path / f"{file}.json")

    yield store
    reference._load_once.cache_clear()


def test_round_trip(tmp_path, result, make_measurement):
    failed = Comparison("other", (make_measurement("a", failed=True),))
    path = save([result, failed], tmp_path / "new folder" / "results.json")
    assert load(path) == load(str(path)) == [result, failed]
    assert path.read_text().endswith("}\n") and os.stat(path).st_mode & 0o777 == 0o644


def test_what_is_written_keeps_its_link_and_its_mode(tmp_path):
    (tmp_path / "far").mkdir()
    file, link = tmp_path / "far" / "page.html", tmp_path / "page.html"
    link.symlink_to(file)
    assert write_whole(link, "first") == link and os.stat(file).st_mode & 0o777 == 0o644
    file.chmod(0o600)
    write_whole(link, "second")
    assert link.is_symlink() and file.read_text() == "second" and os.stat(file).st_mode & 0o777 == 0o600


def test_saving_again_replaces(tmp_path, result):
    path = save([result, result], tmp_path / "results.json")
    assert load(save([], path)) == []
    assert os.listdir(tmp_path) == ["results.json"]


@pytest.mark.parametrize("fault", [OSError("no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["replace", "chmod"])
def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path, result, monkeypatch, place, fault):
    path = save([result], tmp_path / "results.json")
    before = path.read_bytes()

    def fail(*_):
        raise fault

    monkeypatch.setattr(os, place, fail)
    with pytest.raises(type(fault), match=r"results\.json: .*no space" if isinstance(fault, OSError) else None):
        save([result, result], path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["results.json"]


def test_text_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = write_whole(tmp_path / "page.html", "old")
    with pytest.raises(OSError, match=r"page\.html: expected a file that can be written"):
        write_whole(path, "new \ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]


FOREIGN = {
    "empty": "",
    "no JSON": "<html></html>",
    "no text": b"\xff\xfe\x00",
    "a list": "[]",
    "another format": json.dumps({"format": "pytest results", "version": 1, "comparisons": []}),
    "too deep": "[" * 100_000,
    "another version": json.dumps({"format": "effgpu results", "version": 2, "comparisons": []}),
    "no version": json.dumps({"format": "effgpu results", "comparisons": []}),
    "no comparisons": json.dumps(reference.FORMAT),
    "comparisons of nothing": json.dumps(reference.FORMAT | {"comparisons": [{}]}),
    "comparisons that are none": json.dumps(reference.FORMAT | {"comparisons": ["a"]}),
    "null comparisons": json.dumps(reference.FORMAT | {"comparisons": None}),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"label": None},
        {"label": "b"},
        {"unit": None},
        {"items": -1},
        {"flops": "many"},
        {"times": [float("nan")] * 8},
        {"times": [float("inf")] * 8},
        {"energies": [-1.0]},
        {"times": [10**400] * 8},
        {"items": 10**400},
        {"peak_allocated": 10**400},
    ],
)
def test_a_measurement_that_could_not_be_shown_is_refused_by_name(tmp_path, result, wrong):
    path = save([result], tmp_path / "some file.json")
    stored = json.loads(path.read_text())
    stored["comparisons"][0]["measurements"][0] |= wrong
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"some file\.json: expected"):
        load(path)


def test_an_ablation_comes_back_as_one_and_nothing_else_does(tmp_path, make_measurement):
    ablation = Ablation("some", tuple(make_measurement(on) for on in ("none", "a", "b", "a + b")))
    comparison = Comparison("other", (make_measurement("none"), make_measurement("zeros")))
    saved = [ablation, ablation.combinations, comparison]
    assert load(save(saved, tmp_path / "results.json")) == saved


def test_results_of_two_machines_in_one_file_are_refused_by_name(tmp_path, make_measurement, make_gpu):
    path, told = tmp_path / "mixed.json", "comparisons: expected those of one machine, got H200 and A100"
    mixed = [Comparison(name, (make_measurement("a", device=make_gpu(name)),)) for name in ("H200", "A100")]
    with pytest.raises(ValueError, match=told):
        save(mixed, path)
    rows = [comparison.to_dict() for comparison in mixed]
    path.write_text(json.dumps(FORMAT | {"comparisons": rows}))
    with pytest.raises(ValueError, match=rf"mixed\.json: .*{told}"):
        load(path)


def test_one_comparison_in_place_of_a_list_is_refused(tmp_path, result):
    with pytest.raises(TypeError, match=r"comparisons: expected a list of comparisons, got one: pass \[comparison\]"):
        save(result, tmp_path / "results.json")


@pytest.mark.parametrize("kind", FOREIGN)
def test_anything_else_is_refused_by_name(tmp_path, kind):
    path, text = tmp_path / "some file.json", FOREIGN[kind]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"some file\.json: expected"):
        load(path)


def test_a_missing_file_or_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json: expected a results file that can be read"):
        load(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="expected a results file that can be read"):
        load(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_a_truncated_file_is_refused_by_name(tmp_path, result, share):
    text = save([result], tmp_path / "whole.json").read_text().rstrip()
    cut = tmp_path / "cut.json"
    cut.write_text(text[: int(share * (len(text) - 1))])
    with pytest.raises(ValueError, match=r"cut\.json: expected"):
        load(cut)


def test_stored_finds_gpus_by_the_name_of_the_comparison(make_stored, cpu):
    make_stored("b-gpu", "one", "two")
    make_stored("a-gpu", "one")
    make_stored("a-cpu", "one", "two", device=cpu)
    assert [c.device.name for c in stored("one")] == ["a-gpu", "b-gpu"]
    assert [c.device.name for c in stored("two")] == ["b-gpu"]
    assert stored("three") == [] and {c.name for c in stored("one")} == {"one"}


def test_stored_says_which_file_is_broken(make_stored, tmp_path):
    make_stored("a-gpu", "one")
    (tmp_path / "b-gpu.json").write_text("{")
    with pytest.raises(ValueError, match=r"b-gpu\.json: expected"):
        stored("one")


def test_nothing_stored_is_nothing(make_stored):
    assert stored("one") == []


def is_worth_storing(path):
    """Of one GPU, under its name, with one result a name: results of CPUs are not collected."""
    results = load(path)
    one_gpu = len({c.device.name for c in results}) == 1 and results[0].device.kind == "cuda"
    return one_gpu and path.stem == results[0].device.slug and len({c.name for c in results}) == len(results)


def test_all_results_in_the_package_are_a_gpus(make_measurement, make_gpu, tmp_path):
    for device, expected in ((make_gpu(), True), (make_measurement("a").device, False)):
        both = tuple(make_measurement(label, device=device) for label in "ab")
        assert is_worth_storing(save([Comparison("some", both)], tmp_path / f"{device.slug}.json")) == expected
    assert all(map(is_worth_storing, reference.STORED.glob("*.json")))
