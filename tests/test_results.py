"""Tests of effgpu.results: files that hold all or nothing, and are refused by name when they are something else."""

import json
import os

import pytest

from effgpu import results
from effgpu.comparison import Comparison
from effgpu.results import FORMAT, load, save, stored


@pytest.fixture
def result(make_measurement):
    return Comparison("some", (make_measurement("a"), make_measurement("b", 0.01, items=8)))


@pytest.fixture
def make_stored(tmp_path, monkeypatch, make_measurement, make_gpu, cpu):
    """A function that stores a result in a folder that stands in for effgpu/reference/."""
    monkeypatch.setattr(results, "STORED", tmp_path)
    results._load_once.cache_clear()

    def store(file, *names, device=None):
        device = device or make_gpu(file)
        found = [Comparison(name, (make_measurement("a", device=device),)) for name in names]
        return save(found, tmp_path / f"{file}.json")

    yield store
    results._load_once.cache_clear()


def test_what_is_saved_is_what_is_loaded(tmp_path, result, make_measurement):
    fields = {"joules": 2.0, "sm_clock": 1755, "throttled": ("power cap",), "peak_reserved": 2000}
    both = make_measurement("a", **fields), make_measurement("b", failed=True)
    failed = Comparison("other", both, {"b": {"time": 0.5, "memory": 2.0}}, min_effect=0.02)
    path = save([result, failed], tmp_path / "new folder" / "results.json")
    assert load(path) == load(str(path)) == [result, failed]
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize("fault", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path, result, monkeypatch, fault):
    path = save([result], tmp_path / "results.json")
    before = path.read_bytes()

    def fail(*_):
        raise fault

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(fault), match=r"results\.json: .*no space" if isinstance(fault, OSError) else None):
        save([result, result], path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["results.json"]


FOREIGN = {
    "empty": "",
    "another format": json.dumps({"format": "pytest results", "version": 1, "comparisons": []}),
    "too deep": "[" * 100_000,
    "another version": json.dumps({"format": "effgpu results", "version": 4, "comparisons": []}),
    "no comparisons": json.dumps(FORMAT),
    "comparisons of nothing": json.dumps(FORMAT | {"comparisons": [{}]}),
}


@pytest.mark.parametrize("wrong", [{"joules": "much"}, {"turns": [1.0] * 15}])
def test_a_measurement_that_could_not_be_shown_is_refused_by_name(tmp_path, result, wrong):
    path = save([result], tmp_path / "some file.json")
    stored = json.loads(path.read_text())
    stored["comparisons"][0]["measurements"][1] |= wrong
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"some file\.json: expected comparisons as effgpu writes them"):
        load(path)


def test_results_of_two_machines_in_one_file_are_refused_by_name(tmp_path, make_measurement, make_gpu):
    path, told = tmp_path / "mixed.json", "comparisons: expected those of one machine, got H200 and A100"
    mixed = [Comparison(name, (make_measurement("a", device=make_gpu(name)),)) for name in ("H200", "A100")]
    with pytest.raises(ValueError, match=told):
        save(mixed, path)
    rows = [comparison.to_dict() for comparison in mixed]
    path.write_text(json.dumps(FORMAT | {"comparisons": rows}))
    with pytest.raises(ValueError, match=rf"mixed\.json: .*{told}"):
        load(path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_anything_else_is_refused_by_name(tmp_path, kind):
    path, text = tmp_path / "some file.json", FOREIGN[kind]
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some file\.json: expected"):
        load(path)


def test_stored_finds_gpus_by_the_name_of_the_comparison(make_stored, cpu):
    make_stored("b-gpu", "one", "two")
    make_stored("a-gpu", "one")
    make_stored("a-cpu", "one", "two", device=cpu)
    assert [c.device.name for c in stored("one")] == ["a-gpu", "b-gpu"]
    assert [c.device.name for c in stored("two")] == ["b-gpu"]
    assert stored("three") == [] and {c.name for c in stored("one")} == {"one"}


@pytest.mark.parametrize("path", sorted(results.STORED.glob("*.json")), ids=str)
def test_a_file_in_the_package_holds_the_results_of_one_gpu(path):
    """Under its name, and one result a name: results of CPUs are not collected."""
    found = load(path)
    assert {(c.device.kind, c.device.slug) for c in found} == {("cuda", path.stem)}
    assert len({c.name for c in found}) == len(found)
