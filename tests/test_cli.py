"""The command line: what it says and loads, its files, its JSON. `run`, `report` and what is looked at: test_cli_*.py.

Where signals, imports or standard error matter, commands run in a process of their own.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import variant_file

import effgpu
from effgpu.__main__ import main, make_parser
from effgpu.cli import output
from effgpu.cli.exits import Exit
from effgpu.measuring import device
from effgpu.measuring.device import Device

HEAVY = ("transformers", "datasets", "matplotlib")
TRAINS = """
import torch
model = torch.nn.Linear(8, 8).to("cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(9):
    for sample in torch.randn(8, 8).to("cuda"):
        model(sample).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "arguments, unwanted",
    [
        ([], ("torch", *HEAVY)),
        (["--help"], ("torch", *HEAVY)),
        (["info"], HEAVY),
        (["predict", "--gpu", "T4", "--", "python", "train.py"], ("torch", *HEAVY)),  # which the script's process loads
        (["doctor", "--gpu", "T4", "--", "python", "train.py"], ("torch", *HEAVY)),
    ],
)
def test_what_is_asked_for_at_once_loads_nothing_heavy(arguments, unwanted):
    Path("train.py").write_text(TRAINS)
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
    parsed = [make_parser().parse_args(shlex.split(command)[1:]) for command in commands]
    known = next(action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    assert {one.command for one in parsed} == {each.get_default("command") for each in known.values()}


@pytest.mark.parametrize("command", ["predict", "doctor", "bench"])
def test_the_help_of_a_command_has_examples_that_it_takes_and_names_the_gpus(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    examples = re.findall(rf"^  effgpu ({command} .*)$", told, re.MULTILINE)
    assert len(examples) == 3 and all(make_parser().parse_args(shlex.split(each)) for each in examples)
    assert ("GPUs: T4, P100, " in told) == (command != "bench") and not re.search(r"\[--[a-z-]+ [0-9]", told)


def test_it_tells_its_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"effgpu {effgpu.__version__}\n"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", [[], ["predict", "train.py:variant", "--gpu", "T4"]])
def test_a_reader_that_stops_early_ends_a_command_quietly(arguments, buffered):
    Path("train.py").write_text(variant_file())
    told, ours = os.pipe()
    os.close(told)
    variables = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    command = [sys.executable, "-m", "effgpu", *arguments, *(["--json", "found.json"] if arguments else [])]
    answer = subprocess.run(command, stdout=ours, stderr=subprocess.PIPE, text=True, env=variables)
    os.close(ours)
    assert answer.stderr == "" and answer.returncode == 141
    assert Path("found.json").exists() == bool(arguments), "what was found is stored nevertheless"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "asked, told",
    [
        ("predict", "predict: expected a command"),
        ("predict nope.py", "nope.py: expected a Python file"),
        ("predict -- python nope.py", "nope.py: expected a Python file"),
        ("predict nope.py:variant", "nope.py: expected a Python file"),
        ("predict --gpu RTX4090Ti -- python train.py", "gpu: did you mean RTX 4090? expected one of T4, "),
        ("predict --taken 2 -- python train.py", "taken: expected a share from 0 to 1, got 2.0"),
        ("predict --model folder --batch 8 --optimizer adam", "optimizer: expected one of adamw, "),
        ("predict --model folder --batch 8 --gpu T5", "gpu: expected one of T4, "),
        ("doctor -- python nope.py", "nope.py: expected a Python file"),
        ("doctor --gpu T5 -- python train.py", "gpu: expected one of T4, "),
        ("doctor --gpu 16GB -- python train.py", "gpu: expected a GPU whose speed is known"),
        ("doctor --gpu T4 --gpu A100 -- python train.py", "doctor: expected one --gpu, got T4 and A100: "),
        ("bench --precision 0 true", "precision: expected a positive number, got 0.0"),
        ("bench --seeds 3 true", "command 'true': expected {seed} in it"),
        ("bench", "bench: expected commands"),
    ],
)
def test_what_is_wrong_is_said_before_anything_slow_is_imported(asked, told, monkeypatch, capsys):
    Path("train.py").touch()
    for slow in ("torch", "effgpu.predicting.predict", "effgpu.diagnosing.doctor", "effgpu.benching.bench"):
        monkeypatch.setitem(sys.modules, slow, None)  # an import of it fails
    monkeypatch.setattr("effgpu.cli.exits.find_spec", lambda name: object())  # and yet all is installed
    assert main(asked.split()) == 2
    assert capsys.readouterr().err.startswith(f"effgpu: error: {told}")


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


@pytest.mark.parametrize(
    ("arguments", "missing", "expected"),
    [
        (["run"], ("nbclient", "matplotlib"), "running lessons needs more: pip install nbclient matplotlib"),
        (["report", "some.json"], ("matplotlib",), "a report needs more: pip install matplotlib"),
        (["bench", "true", "--plot", "some.png"], ("matplotlib",), "--plot needs more: pip install matplotlib"),
        (["predict", "--", "python", __file__], ("torch",), "effgpu needs more: pip install torch"),
        (["info"], ("torch",), "effgpu needs more: pip install torch"),
    ],
)
def test_a_missing_library_is_refused_with_what_installs_it(arguments, missing, expected, monkeypatch, capsys):
    monkeypatch.setattr("effgpu.cli.exits.find_spec", lambda name: None if name in missing else object())
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"effgpu: error: {expected}\n"


@pytest.mark.parametrize(
    "asked, told",
    [
        ("predict --json no/found.json", "--json: expected a file that can be written"),
        ("predict --trace no/step.json", "--trace: expected a file that can be written"),
        ("doctor --json folder", "--json: expected a file that can be written"),
        ("doctor --json train.py/found.json", "--json: expected a file that can be written"),
        ("bench --json train.py/new/found.json", "--json: expected a file that can be written"),
        ("predict --trace -", "--trace: expected a file, got -"),
        ("doctor --gpu T4 --loader batches", "doctor: expected --loader with FILE.py:VARIANT"),
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
        ("doctor --json=- --gpus T4 -- python train.py", "doctor: there is no option --gpus: did you mean --gpu?"),
        ("bench --seconds --json - -- true", "argument --seconds: expected one argument"),
    ],
)
def test_json_on_standard_output_says_what_is_wrong_with_an_option(asked, why, capsys):
    assert main(asked.split()) == 2
    printed = capsys.readouterr()
    told = json.loads(printed.out)["failed"]
    assert why in told and printed.err == f"effgpu: error: {told}\n"


def test_options_that_are_wrong_print_no_json_where_none_was_asked_for(capsys):
    asked = ["predict", "--batch", "many", "--json", "found.json", "--", "python", "train.py", "--json", "-"]
    assert main(asked) == 2 and not capsys.readouterr().out


AS_ONE_TYPES = "python train.py --lr 0.1"


@pytest.mark.parametrize(
    "asked, told",
    [
        (
            f"predict --gpu T4 {AS_ONE_TYPES}",
            f"put -- before your command, as in effgpu predict --gpu T4 -- {AS_ONE_TYPES}",
        ),
        (f"predict {AS_ONE_TYPES} --gpu T4", f"as in effgpu predict --gpu T4 -- {AS_ONE_TYPES}"),
        (
            f"doctor --gpu T4 {AS_ONE_TYPES}",
            f"put -- before your command, as in effgpu doctor --gpu T4 -- {AS_ONE_TYPES}",
        ),
        ("predict train.py:f --batch 8 --samples 9 --eta 8", "train.py:f --batch 8 --samples 9 -- --eta 8"),
        (f"bench {AS_ONE_TYPES}", f"bench: quote each command, as in effgpu bench '{AS_ONE_TYPES}'"),
        (f"bench --skip 1 {AS_ONE_TYPES} python b.py", f"as in effgpu bench --skip 1 '{AS_ONE_TYPES}' 'python b.py'"),
        ("predict --gpus T4", "predict: there is no option --gpus: did you mean --gpu?"),
        ("predict --lr 0.1 -- python train.py", "predict: expected no --lr; effgpu predict --help says what it takes"),
        ("bench --gpu T4 true", "bench measures on this machine: effgpu predict --gpu tells of another GPU"),
        ("bench --seconds abc true", "bench: argument --seconds: invalid float value: 'abc'; effgpu bench --help says"),
        ("predikt", "there is no command 'predikt': did you mean predict?"),
        ("frobnicate", "there is no command 'frobnicate': expected one of info, run, report, predict, doctor, "),
        ("--frobnicate", "expected no --frobnicate; effgpu --help says what it takes"),
        ("info more", "info: expected no more; effgpu info --help says what it takes"),
    ],
)
def test_arguments_that_no_command_takes_are_refused_with_what_was_meant(asked, told, capsys):
    assert main(asked.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("effgpu: error: ") and printed.err.count("\n") == 1 and not printed.out
    assert told in printed.err


@pytest.mark.parametrize("command", ["predict", "doctor"])
def test_json_on_standard_output_says_that_it_was_interrupted(command, here, capsys):
    Path("train.py").write_text("raise KeyboardInterrupt\ndef variant(): pass\n")
    assert main([command, "--json", "-", "train.py:variant"]) == 130
    assert json.loads(capsys.readouterr().out) == {"failed": "interrupted"}


def test_json_on_standard_output_is_one_also_where_the_trace_cannot_be_written(here, capsys):
    removes = "def variant():\n    import os\n    os.rmdir('folder')\n"
    Path("train.py").write_text(variant_file().replace("def variant():\n", removes))
    Path("folder").mkdir()
    asked = ["predict", "train.py:variant", "--gpu", "T4", "--json", "-", "--trace", "folder/step.json"]
    assert main(asked) == 2 and "allocated" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_what_cannot_be_written_after_all_is_printed_before(option, here, capsys):
    removes = "def variant():\n    import os\n    os.rmdir('folder')\n"
    Path("train.py").write_text(variant_file().replace("def variant():\n", removes))
    Path("folder").mkdir()
    assert main(["predict", "train.py:variant", "--gpu", "T4", option, "folder/found.json"]) == 2
    printed = capsys.readouterr()
    assert "fits" in printed.out and "folder/found.json" in printed.err


@pytest.mark.skipif(os.name != "posix", reason="no pipes by name")
def test_a_pipe_is_a_file_that_can_be_written():
    """As `--json >(jq .)` gives."""
    theirs, ours = os.pipe()
    output.check_files(argparse.Namespace(json=f"/dev/fd/{ours}"))
    os.close(theirs), os.close(ours)
    with pytest.raises(Exit, match="expected a file that can be written"):
        output.check_files(argparse.Namespace(json=f"/dev/fd/{ours}"))


@pytest.mark.usefixtures("here")
def test_what_a_terminal_cannot_write_is_replaced_and_json_is_for_every_one():
    """A pipe of Windows has no minus sign: what was measured would be lost."""
    Path("train.py").write_text(variant_file())
    asked = [sys.executable, "-m", "effgpu", "predict", "--gpu", "T4"]
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    table = subprocess.run([*asked, "train.py:variant"], capture_output=True, env=variables)
    assert table.returncode == 0 and b" ? " in table.stdout, table.stderr
    failed = subprocess.run([*asked, "--json", "-", "−.py:variant"], capture_output=True, env=variables)
    assert "−.py: expected a Python file" in json.loads(failed.stdout.decode("ascii"))["failed"]


@pytest.mark.skipif(os.name != "posix", reason="started by a shell")
def test_without_a_standard_error_only_the_result_is_printed(here):
    asked = shlex.join([sys.executable, "-m", "effgpu", "bench", "--json", "-", "--seeds", "1", "true {seed}"])
    answer = subprocess.run(f"{asked} 2>&-", shell=True, stdout=subprocess.PIPE)
    assert json.loads(answer.stdout) == {"failed": "seeds: expected a whole number from 2 on, got 1"}
