"""Tests of effgpu.results: files that hold all or nothing, and are refused by name when they are something else."""

import json
import math

import pytest

from effgpu import results
from effgpu.benching.result import Bench
from effgpu.comparison import Comparison
from effgpu.results import FORMAT, load, save, stored


@pytest.fixture
def result(make_measurement):
    return Comparison("some", (make_measurement("a"), make_measurement("b", 0.01, items=8)))


def test_what_is_saved_is_what_is_loaded(tmp_path, result, make_measurement):
    fields = {"joules": 2.0, "sm_clock": 1755, "throttled": ("power cap",), "peak_reserved": 2000}
    both = make_measurement("a", **fields), make_measurement("b", failed=True)
    failed = Comparison("other", both, {"b": {"time": 0.5, "memory": 2.0}}, min_effect=0.02)
    path = save([result, failed], tmp_path / "new folder" / "results.json")
    assert load(path) == load(str(path)) == [result, failed]
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize("wrong", [{"joules": "much"}, {"turns": [1.0] * 15}, {"peak_allocated": math.inf}])
def test_a_measurement_that_could_not_be_shown_is_refused_by_name(tmp_path, result, wrong):
    path = save([result], tmp_path / "some file.json")
    content = json.loads(path.read_text())
    content["comparisons"][0]["measurements"][1] |= wrong
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"some file\.json: expected comparisons as effgpu writes them"):
        load(path)


def test_a_bench_that_could_not_be_shown_is_refused_by_name(tmp_path, result):
    path = save([Bench("some", result.measurements, notes=("a", "b"))], tmp_path / "some.json")
    assert load(path)[0].notes == ("a", "b")
    path.write_text(path.read_text().replace('"notes": [', '"notes": [1,'))
    with pytest.raises(ValueError, match=r"some\.json: expected comparisons as effgpu writes them"):
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        pytest.param("[" * 100_000, id="too deep"),
        json.dumps(FORMAT | {"format": "pytest results", "comparisons": []}),
        json.dumps(FORMAT | {"version": FORMAT["version"] - 1, "comparisons": []}),
        json.dumps(FORMAT),
        json.dumps(FORMAT | {"comparisons": [{}]}),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, text):
    path = tmp_path / "some file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some file\.json: expected"):
        load(path)


def test_stored_finds_gpus_by_the_name_of_the_comparison(tmp_path, monkeypatch, make_measurement, make_gpu, cpu):
    monkeypatch.setattr(results, "STORED", tmp_path)
    for device, names in (make_gpu("b-gpu"), ["one", "two"]), (make_gpu("a-gpu"), ["one"]), (cpu, ["one", "two"]):
        found = [Comparison(name, (make_measurement("a", device=device),)) for name in names]
        save(found, tmp_path / f"{device.slug}.json")
    assert [c.device.name for c in stored("one")] == ["a-gpu", "b-gpu"]
    assert [c.device.name for c in stored("two")] == ["b-gpu"]
    assert stored("three") == [] and {c.name for c in stored("one")} == {"one"}


@pytest.mark.parametrize("path", sorted(results.STORED.glob("*.json")), ids=str)
def test_a_file_in_the_package_holds_the_results_of_one_gpu(path):
    """Under its name, and one result a name: results of CPUs are not collected."""
    found = load(path)
    assert {(c.device.kind, c.device.slug) for c in found} == {("cuda", path.stem)}
    assert len({c.name for c in found}) == len(found)
