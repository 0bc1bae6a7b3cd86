"""Tests of the audit of predictions: single operations that a GPU timed, and the lessons that one measured."""

import ast
import csv
import json
import math
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import nbformat
import pytest
import torch
from benchmarks import measured, predictions, published_peaks, published_times, ranges, renew, survey

from effgpu import course, results
from effgpu.comparison import MIME_TYPE, Comparison
from effgpu.course.lessons import LESSONS, find_lessons, find_origin
from effgpu.predicting.audited import CONVOLUTIONAL, TRANSFORMERS, audited_runs, family
from effgpu.predicting.full_size import predict_here
from effgpu.predicting.gpus import TABLE, find_gpu, read_table
from effgpu.predicting.kinds import OTHER, Kernel, Segment
from effgpu.predicting.time import step_time

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def _own_table_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


# --- single operations ---


GPU = replace(read_table(TABLE)["H100"], cache=0)


def surveyed(rows, call=0.1):
    """A survey with such rows, and the microseconds of a call."""
    rows = [{"op": op, "format": format, "shape": shape, "us": us} for op, format, shape, us in rows]
    return {"about": {"device": H100}, "rows": [*rows, {"op": survey.CALL, "format": "fp32", "shape": [1], "us": call}]}


@pytest.fixture(scope="module")
def walked():
    """The rows of a survey of an H100 that took as long as predicted."""
    found = survey.read(surveyed([(*row, 1.0) for row in survey.list_rows(True) if row[1] != "fp16"]), GPU)
    return [replace(row, seconds=row.predict(GPU), is_short=False) for row in found]


def test_a_rehearsal_on_a_cpu_times_every_operation_and_can_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and puts it back
    survey.main(["measure", str(tmp_path / "survey.json")])
    found = json.loads((tmp_path / "survey.json").read_text())
    assert found["about"]["device"] == "cpu" and all(row["us"] > 0 for row in found["rows"])
    assert {row["op"] for row in found["rows"]} == {*survey.OPERATIONS, survey.CALL}
    survey.main(["compare", str(tmp_path / "survey.json"), "--gpu", "H100"])
    assert "short rows" in capsys.readouterr().out


def test_the_comparison_finds_by_which_factor_each_operation_is_off(walked):
    factors = {"mm": 1.25, "softmax": 0.8, "attention": 2.0}
    rows = [replace(row, seconds=row.seconds * factors.get(row.op, 1.0)) for row in walked]
    for row in rows:
        assert math.exp(row.error(GPU)) == pytest.approx(factors.get(row.op, 1.0))
    line = next(line for line in survey.compare(rows, GPU) if line.startswith("mm ") and "bf16" in line)
    assert line.split()[3:5] == ["1.25", "1.25"] and line.split()[6:8] == ["1.25", "1.25"]


def test_a_row_is_predicted_as_a_step_with_this_operation_alone():
    (row,) = survey.read(surveyed([("mm", "bf16", [4096, 4096, 4096], 250.0)]), GPU)
    assert row.flops == 2 * 4096**3 and row.kind == "matrix products" and row.format == "bf16"
    assert row.predict(GPU) == pytest.approx(step_time([row.segment], GPU).expected)


def test_rows_in_which_the_cpu_may_decide_are_not_asked():
    rows = [("mm", "bf16", [512, 768, 768], 8.0), ("mm", "bf16", [512, 768, 768], 8.0)]
    rows += [("mm", "bf16", [16384, 4096, 4096], 900.0), ("mm", "bf16", [16384, 4096, 4096], 900.0)]
    found = survey.read(surveyed(rows, call=7.0), GPU)
    assert [row.is_short for row in found] == [True, True, False, False]
    assert [row.is_even for row in found] == [True, False, True, False]
    told = survey.compare(found, GPU)
    assert told[-1].startswith("2 short rows, in which the CPU may decide: ") and told[-1].endswith("predicted 12.0")
    assert sum(line.startswith("mm ") for line in told) == 1


def test_the_fit_finds_the_constants_that_made_a_survey_and_puts_back_those_of_the_package(walked):
    before = survey.constants(GPU)
    truth = before | {"bf16_TFLOPS": 620.0, "FILL_SECONDS": 4e-6, "norms": 0.8, survey.SHARE + "flash": 0.5}
    truth |= {"bandwidth_GBps": 2600.0}
    with survey.applied(truth, GPU) as changed:
        rows = [replace(row, seconds=row.predict(changed)) for row in walked]
    after, asked = survey.fit(rows, GPU)
    for name in ("bf16_TFLOPS", "tf32_TFLOPS", "FILL_SECONDS", survey.SHARE + "flash"):
        assert after[name] == pytest.approx(truth[name], rel=0.03) and asked[name] > 1
    for name in ("norms", "even"):  # the copy says what bandwidth times EVEN is: not each of them
        product = truth[name] * truth["bandwidth_GBps"]
        assert after[name] * after["bandwidth_GBps"] == pytest.approx(product, rel=0.03)
    odd = [row for row in rows if not row.is_even]
    errors = [[abs(error) for error in survey.errors(odd, values, GPU)] for values in (before, after)]
    assert max(errors[1]) < 0.06 < 0.2 < max(errors[0])
    assert survey.constants(GPU) == before


# --- ranges that hold a source which was not seen ---


def audited_run(source, off, gpu="T4", convolutional=False, format="fp32"):
    """A run that took exp(off) times as long as predicted."""
    kernel = Kernel("add", OTHER, format, 0, 2**32)
    predicted = step_time([Segment(Counter({kernel: 1}))], find_gpu(gpu))
    case = published_times.Case(source, "run", 1.0, None, gpu, format, convolutional)
    expected = predicted.expected
    return published_times.Outcome(expected * math.exp(off), expected, expected, expected, expected, case, predicted)


OTHERS_OFF = [0.05, -0.05, 0.1, -0.1, 0.15, -0.15, 0.2, -0.2, 0.25, -0.4]


def test_a_range_is_as_wide_as_nine_of_ten_sources_ask_for():
    runs = [audited_run(f"source {number}", off) for number, off in enumerate(OTHERS_OFF)]
    fitted = ranges.fit(runs, ranges.NONE)
    width = fitted.sources[TRANSFORMERS]
    assert sum(ranges.is_inside(run, width) for run in runs) == 9
    assert not all(ranges.is_inside(run, width - 0.01) for run in runs[:9])
    assert fitted.sources[CONVOLUTIONAL] == fitted.extrapolated == 0, "nothing asks for more"
    repeated = runs + [audited_run("source 9", -0.4)] * 30
    assert ranges.fit(repeated, ranges.NONE) == fitted, "a source counts once, however many runs it has"


def test_what_one_source_alone_checks_counts_as_not_compared():
    runs = [audited_run(f"source {number}", off) for number, off in enumerate(OTHERS_OFF)]
    alone = [audited_run("lonely", 0.45, "L4"), audited_run("convolving", -0.3, convolutional=True)]
    fitted = ranges.fit(runs + alone, ranges.NONE)
    assert fitted.sources == ranges.fit(runs, ranges.NONE).sources and fitted.extrapolated > 0.1
    inside = [ranges.is_inside(o, fitted.sources[ranges.cell(o)[1]], fitted.extrapolated) for o in alone]
    assert inside == [True, True]
    left_out = ranges.leave_out(runs + alone, ranges.NONE)
    assert left_out["source 0"] == (1, 1) and left_out["source 9"] == (0, 1)
    assert left_out["lonely"] == (0, 1), "without it, nothing asks for so much"
    assert ranges.fit([]) == ranges.LEAST


def test_cells_are_counted_by_gpu_kind_and_format():
    runs = [audited_run("a", 0.1, "A100 40 GB"), audited_run("b", 0.3, "A100 80 GB"), audited_run("c", 0.0, "L4")]
    found = ranges.cells(runs, [(("H100", TRANSFORMERS, "tf32"), -0.2)])
    table = {line.split(" | ")[0]: line for line in ranges.as_table(found)}
    assert table["| L4"] == "| L4 | 0% (1) | – | – | – | – | – | – | – |"
    assert table["| A100"].startswith("| A100 | 18% (2) | –") and table["| H100"].split(" | ")[2] == "20% (1)"
    rows = list(csv.DictReader(ranges.as_csv(found).splitlines()))
    assert [row["gpu"] for row in rows] == ["A100", "H100", "L4"]
    assert (rows[0]["runs"], rows[0]["sources"], rows[1]["format"]) == ("2", "2", "tf32")


def test_the_pages_show_every_run_and_the_package_counts_them():
    page = predictions.EVERY.read_text(encoding="utf-8")
    for cases in (published_times.CASES, published_peaks.CASES):
        for case in cases:
            assert getattr(case, "calibrates", False) or f"| {case.name} |" in page, case.name
    chosen = [case for case in published_times.CASES if not case.calibrates]
    counted = Counter((family(c.gpu), CONVOLUTIONAL if c.convolutional else TRANSFORMERS, c.format) for c in chosen)
    for (gpu, kind, format), number in counted.items():
        assert audited_runs(gpu, kind, format.replace("TF", "tf")) >= number
    cells = predictions.PAGE.read_text(encoding="utf-8").partition("### By GPU and format")[2]
    for gpu in map(family, read_table(TABLE)):
        assert f"\n| {gpu} | " in cells


def test_rows_are_replaced_below_their_heading_alone():
    text = "\n## A\n\n| x |\n|---|\n| 1 |\n| 2 |\n\nbetween\n\n## B\n\n| y |\n|---|\n| 3 |\n"
    told = predictions.replace(text, {"betw..n": "then"}, {"## A": ["| 7 |"], "## B": ["| 8 |", "| 9 |"]})
    assert told == "\n## A\n\n| x |\n|---|\n| 7 |\n\nthen\n\n## B\n\n| y |\n|---|\n| 8 |\n| 9 |\n"


# --- lessons ---


@pytest.fixture
def stored(tmp_path, make_gpu, make_measurement):
    """A function that writes a results file of a lesson, with so many times the predicted seconds."""

    def write(name, batch=64, slower=1.0):
        device = replace(make_gpu(H100), name=H100)
        statements = measured.find_statements(LESSONS / f"{name}.ipynb", name)
        with measured.sized_for_gpu(batch):
            here = predict_here(measured.find_variants(statements, LESSONS)[0], H100)
        rows = [
            make_measurement(label, slower * told.seconds[0], device=device, peak_allocated=told.allocated)
            for label, told in here.items()
        ]
        return results.save([Comparison(name, tuple(rows), here=here)], tmp_path / "h100.json")

    return write


def test_a_lessons_variants_are_walked_again_with_the_batch_of_the_gpu(stored):
    ((gpu, outcomes),) = measured.audit([stored("11_no_grad_validation", batch=32, slower=1.1)]).items()
    assert gpu == H100 and [o.label for o in outcomes] == ["eval()", "no_grad()"]
    for outcome in outcomes:
        assert outcome.format == "bf16" and outcome.now.expected == pytest.approx(outcome.stored.expected)
        assert 1 / (1 + outcome.now.error) == pytest.approx(1.1)
        assert abs(outcome.memory.error) < 0.15  # cuBLAS's workspaces come on top


def test_the_section_has_a_row_for_each_variant_and_says_which_lie_outside(stored):
    path = stored("11_no_grad_validation", slower=3.0)
    told = measured.section(measured.audit([path]))
    assert told.startswith(f"### {H100}\n") and told.count("−66.7%, outside") == 4  # two variants, then and now
    assert "| all variants | 2 | 66.7% | 66.7% | 0 of 2 |" in told
    alone = measured.section(measured.audit([path], walks=False))
    assert "| format not known | 2 | – | – | – | 66.7% | 66.7% | 0 of 2 |" in alone


def test_a_lesson_that_has_changed_is_told_as_it_was_stored(stored, monkeypatch, capsys):
    path = stored("11_no_grad_validation")
    monkeypatch.setattr(measured, "find_statements", lambda path, name: [])
    ((_, outcomes),) = measured.audit([path]).items()
    assert all(outcome.now is None and outcome.stored.error == pytest.approx(0) for outcome in outcomes)
    assert capsys.readouterr().err.startswith("11_no_grad_validation: not walked: no lesson")


def test_a_lesson_or_an_earlier_form_of_it_compares_what_each_gpu_measured():
    """Else its steps could not be predicted again with other rules."""
    paths = [*measured.EARLIER.glob("*.py"), *LESSONS.glob("*.ipynb")]
    for comparison in chain(*map(results.load, results.STORED.glob("*.json"))):
        if comparison.here:
            statements = next(filter(None, (measured.find_statements(path, comparison.name) for path in paths)), [])
            said = {node.value for each in statements for node in ast.walk(each) if isinstance(node, ast.Constant)}
            assert said >= comparison.here.keys(), comparison.name


def test_without_results_of_a_gpu_the_section_says_so(tmp_path, make_measurement):
    path = results.save([Comparison("07_gradient_checkpointing", (make_measurement("plain"),))], tmp_path / "cpu.json")
    assert measured.section(measured.audit([path])) == measured.section({}) == measured.NONE


def test_of_a_lesson_only_what_its_comparison_needs_is_run(tmp_path):
    cells = [
        "import effgpu\nimport torch\n%matplotlib inline\nwidth = 4",
        "def training():\n    model = make()\n    return lambda: model(torch.ones(1, width))\n",
        "raise RuntimeError('a check')\nsizes = {}\nsizes['width'] = 8",
        "def make():\n    return torch.nn.Linear(width, 2, device=device)\n\ndevice = effgpu.find_device()",
        "variants = {}\nfor label in 'ab':\n    variants[label] = training",
        "result = effgpu.compare(variants, name='toy')\nresult",
    ]
    lesson = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    (tmp_path / "toy.ipynb").write_text(json.dumps(lesson))
    statements = measured.find_statements(tmp_path / "toy.ipynb", "toy")
    code = "\n".join(map(ast.unparse, statements))
    assert len(statements) == 9 and not any(left_out in code for left_out in ("check", "sizes", "matplotlib"))
    assert list(measured.find_variants(statements, tmp_path)[0]) == ["a", "b"]
    assert measured.find_statements(tmp_path / "toy.ipynb", "another") == []


def test_the_page_has_a_place_for_what_was_measured():
    page = predictions.PAGE.read_text(encoding="utf-8")
    replaced = predictions.replace_part(page, "measured by us", "a table")
    assert "<!-- measured by us: begin -->\n\na table\n\n<!-- measured by us: end -->" in replaced
    assert predictions.replace_part(replaced, "measured by us", measured.NONE).count(measured.NONE) == 1
    with pytest.raises(ValueError, match="expected <!-- other: begin -->"):
        predictions.replace_part(page, "other", "a table")


# --- Hopper's shares, held against the rows that did not take part in fitting them ---


def test_single_operations_of_an_h100_take_what_its_survey_measured():
    """Attention in fp32 is no TF32, whatever the switch says, and TF32 is slower across its matrices."""
    gpu, stored = read_table(TABLE)["H100"], json.loads(Path(course.__file__).with_name("survey_h100.json").read_text())
    most = {("mm_weight_gradient", "tf32"): 0.15, ("attention_both_passes", "fp32"): 0.2, ("mm", "fp32"): 0.05}
    chosen = [row for row in stored["rows"] if (row["op"], row["format"]) in most]
    found = survey.read({"about": stored["about"], "rows": chosen}, gpu)
    for key, bound in most.items():
        errors = [abs(row.error(gpu)) for row in found if (row.op, row.format) == key and not row.is_short]
        assert len(errors) >= 2 and statistics.median(errors) < bound, key


# --- what lessons store of a GPU ---


def stored_by_gpus():
    return [path for path in find_lessons() if not find_origin(path).device.startswith("cpu")]


@pytest.mark.slow
@pytest.mark.parametrize("path", stored_by_gpus(), ids=lambda path: path.stem)
def test_what_a_lesson_stores_as_predicted_is_what_is_predicted_today(path, tmp_path):
    copy = shutil.copy(path, tmp_path)
    assert not renew.renew(Path(copy)), "make renew"


def test_renewing_changes_what_was_predicted_and_nothing_that_was_measured(tmp_path, monkeypatch):
    path = Path(shutil.copy(LESSONS / "11_no_grad_validation.ipynb", tmp_path))
    (before,) = _comparisons(path)
    slow = replace(read_table(TABLE)["H100"], bandwidth=1e11)
    monkeypatch.setattr(renew, "predict_here", lambda variants, name: predict_here(variants, slow))
    assert renew.renew(path)
    (after,) = _comparisons(path)
    assert after.measurements == before.measurements and after.device == before.device
    for label, here in after.here.items():
        assert here.seconds[0] > 1.5 * before.here[label].seconds[0]
    assert nbformat.read(path, as_version=4).metadata == nbformat.read(LESSONS / path.name, as_version=4).metadata


def _comparisons(path):
    data = [o.get("data", {}) for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", [])]
    return [results.comparison_from_dict(each[MIME_TYPE]) for each in data if MIME_TYPE in each]
