"""The commands. Where signals, imports or standard error matter, they run in a process of their own."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from test_runner import FAILING, compares, write_lesson

import effgpu
from effgpu import results
from effgpu.__main__ import _parser, main
from effgpu.comparison import Comparison
from effgpu.course import runner
from effgpu.measuring import device, timing
from effgpu.measuring.device import Device

ENDLESS = """\
import os, pathlib, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.part").write_text(f"{os.getpid()} {worker.pid}")
os.rename("pids.part", "pids")
time.sleep(600)"""
HEAVY = ("transformers", "datasets", "matplotlib")
RUN = [sys.executable, "-m", "effgpu", "run"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to run commands in: in this process, or in one of its own with this package and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(timing.CAP, "inf")
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "arguments, unwanted", [([], ("torch", *HEAVY)), (["--help"], ("torch", *HEAVY)), (["info"], HEAVY)]
)
def test_what_is_asked_for_at_once_loads_nothing_heavy(arguments, unwanted):
    script = (
        "import sys\nfrom effgpu.__main__ import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        f"print('loaded', [name for name in {unwanted} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == "loaded []", answer.stderr


def test_alone_it_tells_the_questions_each_with_a_command_that_it_takes(capsys):
    assert main([]) == 0
    *pairs, last = capsys.readouterr().out.strip().split("\n\n")
    questions, commands = zip(*(pair.split("\n    ") for pair in pairs))
    assert all(question.endswith("?") for question in questions) and "--help" in last
    parsed = [_parser().parse_args(shlex.split(command)[1:]) for command in commands]
    known = next(action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    assert {one.command for one in parsed} == {each.get_default("command") for each in known.values()}


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"effgpu {effgpu.__version__}\n"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", [[], ["predict", "train.py:variant", "--gpu", "T4"]])
def test_a_reader_that_stops_early_ends_a_command_quietly(arguments, buffered):
    Path("train.py").write_text(STEP.format(width=8))
    told, ours = os.pipe()
    os.close(told)
    variables = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-m", "effgpu", *arguments]
    answer = subprocess.run(command, stdout=ours, stderr=subprocess.PIPE, text=True, env=variables)
    os.close(ours)
    assert answer.stderr == "" and answer.returncode == 141


ABACUS = Device("Abacus", "cpu", 2**30, 3, versions={"torch": "2.8.0"})
ABACUS_IS = "device Abacus (CPU, 3 cores) memory 1.00 GiB CPU cores 3 versions torch 2.8.0 No GPU that CUDA can use."
T4 = Device("Tesla T4", "cuda", 2**34, 2, 40, (7, 5), "570.1", {"bf16": "emulated", "fp8": "no"}, {"cuda": "12.8"})
T4_IS = "device Tesla T4 memory 16.0 GiB CPU cores 2 compute capability 7.5 multiprocessors 40 driver 570.1"


@pytest.mark.parametrize(
    "machine, told", [(ABACUS, ABACUS_IS), (T4, f"{T4_IS} supports bf16 emulated fp8 no versions cuda 12.8")]
)
def test_info_says_what_the_machine_supports_and_plainly_if_it_has_no_gpu(machine, told, monkeypatch, capsys):
    monkeypatch.setattr(device, "describe", lambda: machine)
    assert main(["info"]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(told)


def test_a_run_leaves_notebooks_results_and_a_report_that_names_what_failed(here, capfd):
    for name, cell in {"01_one": compares("01_one"), "02_bad": FAILING, "03_two": compares("two")}.items():
        write_lesson(here / "notebooks", name, "1 + 1", cell)
    before = (here / "notebooks" / "01_one.ipynb").read_bytes()
    answer = subprocess.run(RUN, capture_output=True, text=True)
    assert answer.returncode == 1
    lines = [re.sub(r" +\d+ s  ", " 0 s  ", line) for line in answer.stdout.splitlines()]
    assert lines == [
        "01_one 0 s  fast: 2.00 × faster [2.00, 2.00], −50 % memory",
        "02_bad 0 s  failed",
        "03_two 0 s  nothing to compare on this machine",
        "2 of 3 lessons ran without an error: out/report.html",
    ]
    assert "01_one" in answer.stderr and "left" in answer.stderr and "WARNING" not in answer.stderr
    assert answer.stderr.splitlines()[-1] == "failed: 02_bad: cell [2] '# a comment': ArithmeticError: no such number"
    made = sorted(str(path.relative_to(here / "out")) for path in (here / "out").rglob("*.*"))
    calculator = "results/cpu-pocket-calculator-1-cores.json"
    assert made == [*(f"notebooks/{name}.ipynb" for name in ("01_one", "02_bad", "03_two")), "report.html", calculator]
    assert [comparison.name for comparison in results.load(here / "out" / calculator)] == ["01_one", "two"]
    assert "no such number" in (here / "out" / "report.html").read_text()
    assert (here / "notebooks" / "01_one.ipynb").read_bytes() == before
    assert main(["run", "01"]) == 0
    assert capfd.readouterr().out.endswith("\n1 of 1 lessons ran without an error: out/report.html\n")
    page = (here / "out" / "report.html").read_text()
    assert "no such number" in page, "of a lesson that was not run again"
    assert "03_two" not in page, "it was measured on another machine"


def test_seconds_cap_every_measurement_of_a_run(here):
    lesson = write_lesson(here, "01_one", f"import os; print(os.environ[{timing.CAP!r}])")
    before = dict(os.environ)
    assert main(["run", str(lesson), "--seconds", "0.5"]) == 0
    assert os.environ == before
    assert not list((here / "out").glob("*.html")), "a quick look must not replace results"
    executed = nbformat.read(here / "out" / "look" / "notebooks" / "01_one.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "0.5\n"


def test_a_lesson_and_a_report_that_cannot_be_written_keep_the_results(here, capsys):
    removes = "import os\nos.rmdir('../out/notebooks')\nopen('../out/notebooks', 'w')\nos.mkdir('../out/report.html')"
    write_lesson(here / "notebooks", "01_removes", compares("done"), removes)
    assert main(["run"]) == 1
    errors = capsys.readouterr().err
    assert "failed: 01_removes: could not be written: " in errors
    assert "failed: the report: out/report.html: expected a file that can be written" in errors
    (stored,) = (here / "out" / "results").glob("*.json")
    assert [comparison.name for comparison in results.load(stored)] == ["done"]


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_leaves_no_kernel_and_keeps_what_is_done(sent, here):
    for name, last in {"01_done": "1 + 1", "02_endless": ENDLESS, "03_never": "1 + 1"}.items():
        write_lesson(here / "notebooks", name, compares(name), last)
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in the background
    run = subprocess.Popen(RUN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    pids, deadline = here / "notebooks" / "pids", time.monotonic() + 120
    while not pids.exists():
        assert time.monotonic() < deadline, "the lesson does not run"
        time.sleep(0.1)
    run.send_signal(sent)
    _, printed = run.communicate(timeout=100)
    assert run.returncode == 130
    ending = "failed: 02_endless: interrupted\ninterrupted: 1 of 3 lessons were not run\n"
    assert "Traceback" not in printed and printed.endswith(ending), printed
    started = [*map(int, pids.read_text().split())]
    assert not [p for p in psutil.process_iter() if p.pid in started and p.status() != psutil.STATUS_ZOMBIE]
    assert [path.name for path in (here / "out" / "notebooks").iterdir()] == ["01_done.ipynb"]
    (stored,) = (here / "out" / "results").iterdir()
    assert [comparison.name for comparison in results.load(stored)] == ["01_done", "02_endless"]
    assert "02_endless" in (here / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "arguments, cap, told",
    [
        (["run", "2"], "inf", "unknown lesson '2'; known: 01_one"),
        (["run", "--out", "file/out"], "inf", "file/out"),
        (["run", "--out", "old"], "inf", "old/results/mine.json: expected"),
        (["run", "--seconds", "nan"], "inf", "--seconds: expected a positive number, got nan"),
        (["run"], "few", "'few'"),
        (["run", "--at-once", "0"], "inf", "--at-once: expected a positive whole number, got 0"),
        (["run", "--at-once", "2"], "inf", "--at-once: on a CPU, lessons that run at once slow each other down"),
        (["run", "--inplace"], "0.5", "--inplace stores results, but --seconds or EFFGPU_SECONDS"),
        (["report", "old/results/mine.json"], "inf", "old/results/mine.json: expected"),
        (["report", "file"], "inf", "file: expected comparisons, got none"),
    ],
)
def test_what_cannot_be_run_or_reported_is_refused_in_one_line(arguments, cap, told, here, monkeypatch, capsys):
    write_lesson(here / "notebooks", "01_one", "1 + 1")
    (here / "old" / "results").mkdir(parents=True)
    (here / "old" / "results" / "mine.json").write_text("{}")
    (here / "file").write_text(json.dumps(results.FORMAT | {"comparisons": []}))
    monkeypatch.setenv(timing.CAP, cap)
    monkeypatch.setattr(runner, "run", None)
    assert main(arguments) == 2 and not Path("report.html").exists()
    answer = capsys.readouterr().err
    assert answer.startswith("effgpu: error: ") and answer.count("\n") == 1 and told in answer


def test_inplace_reaches_the_run(here, monkeypatch):
    write_lesson(here / "notebooks", "01_one", "1 + 1")
    asked = []
    monkeypatch.setattr(runner, "prepare", lambda out, *others: asked.append([*map(str, others)]))
    monkeypatch.setattr(runner, "run", lambda lessons, out, inplace, **_: asked.append(inplace) or ())
    assert main(["run"]) == main(["run", "--inplace"]) == 0
    assert asked == [[], False, ["notebooks"], True]


def test_a_run_says_what_its_budget_left_out(here, monkeypatch, capsys):
    names = ("01_done", "02_slow", "03_never")
    for name in names:
        write_lesson(here / "notebooks", name, "1 + 1")
    seconds = {"02_slow": 70.4}
    late = [
        runner.Outcome(name, name, failure=runner.OUT_OF_TIME, seconds=seconds.get(name, 0.0)) for name in names[1:]
    ]
    asked = []
    outcomes = [runner.Outcome("01_done", "One"), *late]
    monkeypatch.setattr(runner, "run", lambda lessons, out, budget, **_: asked.append(budget) or outcomes)
    assert main(["run", "--budget", "1.5m"]) == 0 and asked == [90]
    told = capsys.readouterr().out.splitlines()
    assert "left out, as the time was over: 02_slow (stopped after 70 s), 03_never" in told
    assert told[-1].startswith("1 of 3 lessons ran without an error")


def test_a_cpus_outputs_do_not_replace_a_gpus(here, monkeypatch, capsys):
    path = write_lesson(here / "notebooks", "01_one", "1 + 1")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["effgpu"] = {"device": "nvidia-test", "code": runner.digest(notebook)}
    nbformat.write(notebook, path)
    monkeypatch.setattr(runner, "run", None)
    assert main(["run", "--inplace"]) == 2
    assert "01_one stores a GPU's outputs, which a CPU's would replace" in capsys.readouterr().err
    assert main(["run", "--inplace", "--missing"]) == 0
    assert capsys.readouterr().out == "every lesson stores outputs of its code\n"


def test_a_report_goes_to_report_html_and_does_not_overwrite_the_results(here, capsys, make_measurement):
    path = results.save([Comparison("some", (make_measurement("a"), make_measurement("b")))], "a.json")
    before = path.read_bytes()
    assert main(["report", "a.json"]) == 0
    assert capsys.readouterr().out == "report.html\n" and Path("report.html").exists()
    assert main(["report", "a.json", "--out", str(path.absolute())]) == 2
    assert "--out: expected a file for the report" in capsys.readouterr().err and path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "missing", "expected"),
    [
        (["run"], ("nbclient", "matplotlib"), "running lessons needs more: pip install nbclient matplotlib"),
        (["report", "some.json"], ("matplotlib",), "a report needs more: pip install matplotlib"),
        (["bench", "true", "--plot", "some.png"], ("matplotlib",), "--plot needs more: pip install matplotlib"),
    ],
)
def test_a_missing_library_is_refused_with_what_installs_it(arguments, missing, expected, monkeypatch, capsys):
    monkeypatch.setattr("effgpu.__main__.find_spec", lambda name: None if name in missing else object())
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"effgpu: error: {expected}\n"


STEP = """
import torch

def variant():
    model = torch.nn.Linear({width}, {width})

    def step():
        model(torch.ones(4, {width})).sum().backward()

    return step
"""


OWNERS = r"\n  weights +1\.00 MiB\n  gradients +1\.00 MiB\n"


@pytest.mark.parametrize(
    "width, options, code, told",
    [
        (512, ["--gpu", "T4"], 0, OWNERS),
        (60_000, ["--gpu", "T4"], 3, "T4 .* does not fit"),
        (35_000, ["--gpu", "T4"], 4, "T4 .* may not fit"),
        (60_000, [], 0, "T4 .* does not fit"),
    ],
)
def test_predict_says_by_its_exit_code_whether_a_step_fits(width, options, code, told, tmp_path, capsys):
    (tmp_path / "train.py").write_text(STEP.format(width=width))
    assert main(["predict", f"{tmp_path}/train.py:variant", *options]) == code
    assert re.search(told, capsys.readouterr().out)


@pytest.mark.parametrize(
    "asked, why",
    [
        (["train.py"], "FILE.py:VARIANT"),
        (["{path}:other"], "a function called other"),
        (["{path}:torch"], "a function called torch"),
        (["missing.py:variant"], "missing.py: expected a Python file"),
        (["{path}:variant", "--gpu", "T5"], "gpu: expected one of"),
        (["{path}:nothing"], "variant 'nothing': expected it to return its training step"),
        (["{path}:"], "train.py:: expected the name of a function after the colon"),
        (["{path}:", "--", "--width", "8"], "train.py:: expected the name of a function after the colon"),
        (["{path}:variant", "{path}:nothing"], "predict: expected one FILE.py:VARIANT, got "),
        (["{path}:variant", "{path}:nothing", "--", "8"], "predict: expected one FILE.py:VARIANT, got "),
        (["{path}:variant", "--samples", "9"], "predict: expected --batch with --samples"),
        (["{path}:variant", "--batch", "9"], "predict: expected --samples or --model with --batch"),
        (["{path}:by_value"], "the shape of a result depends on values"),
    ],
)
def test_predict_says_what_it_expected(asked, why, tmp_path, capsys):
    path = tmp_path / "train.py"
    by_value = "lambda: lambda: torch.rand(3).long().bincount()"
    path.write_text(STEP.format(width=8) + f"\ndef nothing(): pass\nby_value = {by_value}\n")
    assert main(["predict", *(word.format(path=path) for word in asked)]) == 2
    printed = capsys.readouterr().err
    assert why in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    "asked, told",
    [
        ("predict --json no/found.json", "--json: expected a file that can be written"),
        ("predict --trace no/step.json", "--trace: expected a file that can be written"),
        ("doctor --json folder", "--json: expected a file that can be written"),
        ("doctor --json train.py/found.json", "--json: expected a file that can be written"),
        ("bench --json train.py/new/found.json", "--json: expected a file that can be written"),
        ("bench --plot no/found.png", "--plot: expected a file that can be written"),
        ("bench --plot found.xyz", "--plot: expected a name that ends in .png, .svg or .pdf, got found.xyz"),
        ("bench --plot found", "--plot: expected a name that ends in .png, .svg or .pdf, got found"),
        (f"doctor --json {300 * 'a'}", "--json: expected a file that can be written"),
        (f"predict --trace {300 * 'a'}", "--trace: expected a file that can be written"),
        ("predict --json one.json --trace folder/../one.json", "--json and --trace: expected a file for each"),
        ("bench --json one.json --plot one.json", "--json and --plot: expected a file for each"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_anything_runs(asked, told, here, capsys):
    Path("train.py").write_text("open('ran', 'w')")
    Path("folder").mkdir()
    assert main([*asked.split(), "--", "python", "train.py"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"effgpu: error: {told}") and printed.err.count("\n") == 1, printed.err
    assert not printed.out and {path.name for path in here.iterdir()} == {"train.py", "folder"}


@pytest.mark.parametrize(
    "asked, code",
    [
        ("predict --gpu T4 --json - -- python train.py", 1),
        ("predict --gpu T4 --json - train.py:variant", 1),
        ("predict --gpu T5 --json - -- python train.py", 2),
        ("predict --json - --trace no/step.json -- python train.py", 2),
        ("doctor --gpu T4 --json - -- python train.py", 1),
        ("doctor --gpu T4 --json - missing.py:variant", 2),
        ("bench --json - true{seed}", 2),
    ],
)
def test_json_on_standard_output_says_why_there_is_no_result(asked, code, here, capsys):
    Path("train.py").write_text("raise ValueError('no data')")
    assert main(asked.split()) == code
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert list(told) == ["failed"] and printed.err.endswith(f"effgpu: error: {told['failed']}\n")


@pytest.mark.parametrize(
    "asked, why",
    [
        ("predict --json - --batch many -- python train.py", "argument --batch: invalid int value: 'many'"),
        ("doctor --json=- --gpus T4 -- python train.py", "unrecognized arguments: --gpus"),
        ("bench --seconds --json - -- true", "argument --seconds: expected one argument"),
    ],
)
def test_json_on_standard_output_says_what_is_wrong_with_an_option(asked, why, capsys):
    with pytest.raises(SystemExit) as refused:
        main(asked.split())
    printed = capsys.readouterr()
    assert refused.value.code == 2 and why in json.loads(printed.out)["failed"]
    assert printed.err.startswith("usage: effgpu") and f"error: {why}" in printed.err


def test_options_that_are_wrong_print_no_json_where_none_was_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--batch", "many", "--json", "found.json", "--", "python", "train.py", "--json", "-"])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "doctor"])
def test_json_on_standard_output_says_that_it_was_interrupted(command, here, capsys):
    Path("train.py").write_text("raise KeyboardInterrupt\ndef variant(): pass\n")
    assert main([command, "--json", "-", "train.py:variant"]) == 130
    assert json.loads(capsys.readouterr().out) == {"failed": "interrupted"}


def test_json_on_standard_output_is_one_also_where_the_trace_cannot_be_written(here, capsys):
    removes = "def variant():\n    import os\n    os.rmdir('folder')\n"
    Path("train.py").write_text(STEP.format(width=8).replace("def variant():\n", removes))
    Path("folder").mkdir()
    asked = ["predict", "train.py:variant", "--gpu", "T4", "--json", "-", "--trace", "folder/step.json"]
    assert main(asked) == 2 and "allocated" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_what_cannot_be_written_after_all_is_printed_before(option, here, capsys):
    removes = "def variant():\n    import os\n    os.rmdir('folder')\n"
    Path("train.py").write_text(STEP.format(width=8).replace("def variant():\n", removes))
    Path("folder").mkdir()
    assert main(["predict", "train.py:variant", "--gpu", "T4", option, "folder/found.json"]) == 2
    printed = capsys.readouterr()
    assert "fits" in printed.out and "folder/found.json" in printed.err


def test_predict_finds_the_modules_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "its_neighbour.py").write_text("width = 8")
    (tmp_path / "train.py").write_text(STEP.format(width="its_neighbour.width") + "\nimport its_neighbour\n")
    assert main(["predict", f"{tmp_path / 'train.py'}:variant", "--gpu", "T4"]) == 0


def test_a_program_that_is_installed_may_have_no_arguments(here, monkeypatch, capsys):
    train = "model = torch.nn.Linear(8, 8).cuda()\noptimizer = torch.optim.SGD(model.parameters())\n"
    train += "for _ in range(3):\n    model(torch.ones(4, 8).cuda()).sum().backward()\n    optimizer.step()\n"
    installed = here / "bin" / "my-train"
    installed.parent.mkdir()
    installed.write_text(f"#!{sys.executable}\nimport torch\n{train}")
    installed.chmod(0o755)
    monkeypatch.setenv("PATH", str(installed.parent), prepend=os.pathsep)
    assert main(["predict", "--gpu", "T4", "--", "my-train"]) == 0
    assert "fits" in capsys.readouterr().out


WITH_ARGUMENTS = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
width = parser.parse_args().width


def variant():
    model = torch.nn.Linear(width, width)
    return lambda: model(torch.zeros(8, width)).mean().backward()
"""


@pytest.mark.parametrize("arguments, width", [([], 256), (["--", "--width", "512"], 512)])
def test_a_functions_file_sees_its_own_arguments(arguments, width, here, capsys):
    Path("train.py").write_text(WITH_ARGUMENTS)
    assert main(["predict", "train.py:variant", "--gpu", "T4", "--json", "-", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["owners"]["weights"] >= 4 * width * width
    assert sys.argv[0] != "train.py"


@pytest.mark.parametrize("name", ["package/train.py:variant", "package.train:variant"])
def test_a_functions_file_may_be_part_of_a_package(name, here, monkeypatch):
    Path("package").mkdir()
    Path("package/__init__.py").write_text("width = 8")
    built = "def variant():\n    return lambda: torch.zeros(width, requires_grad=True).sum()"
    text = f"import torch\nfrom . import width\n\n{built}"
    Path("package/train.py").write_text(text)
    for module in ("package", "package.train"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert main(["predict", name, "--gpu", "T4"]) == 0


@pytest.mark.parametrize(
    "text, code, told",
    [
        ("def variant(): return lambda batch: None", 2, "step: expected one that takes nothing, and loads its batch"),
        ("raise ValueError('no data\\nand more')", 1, r"train.py:variant failed: ValueError: no data \(.*train.py:1\)"),
        (
            "def variant():\n    raise KeyError('a' * 9999)",
            1,
            r"train.py:variant failed: KeyError: '(a{299}) \.\.\. \(.*:2\)",
        ),
        ("import sys\nsys.exit(3)", 1, r"train.py:variant failed: SystemExit: 3 \(.*train.py:2\)"),
        (
            "def variant():\n    rows = iter([1])\n    return lambda: next(rows)",
            2,
            "^effgpu: error: the step ran out of data: a measurement calls it often, so let its loader start anew$",
        ),
        (
            "import torch\ndef variant(): torch.multiprocessing.spawn(print, nprocs=2)",
            2,
            "^effgpu: error: predict: asks for 2 ranks, and one process is predicted: start it with one$",
        ),
        # errors of the file's own that begin as ours do
        (
            "def variant():\n    raise ValueError('gpu: all are busy')",
            1,
            r"train.py:variant failed: ValueError: gpu: all are busy \(.*train.py:2\)",
        ),
        (
            "def variant():\n    raise RuntimeError('predict: no weights')",
            1,
            r"train.py:variant failed: RuntimeError: predict: no weights \(.*train.py:2\)",
        ),
    ],
)
def test_an_error_in_a_functions_file_is_one_line(text, code, told, here, capsys):
    Path("train.py").write_text(text)
    assert main(["predict", "train.py:variant", "--gpu", "T4"]) == code
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1 and re.search(told, errors), errors
