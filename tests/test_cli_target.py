"""What `predict` and `doctor` look at: FILE.py:VARIANT, a function of a file, or a program that is installed."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import variant_file

from effgpu.__main__ import main

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
    (tmp_path / "train.py").write_text(variant_file(width))
    assert main(["predict", f"{tmp_path}/train.py:variant", *options]) == code
    assert re.search(told, capsys.readouterr().out)


@pytest.mark.parametrize(
    "asked, why",
    [
        (["train"], "FILE.py:VARIANT"),
        (["train.py"], "train.py: expected a Python file, as in `python train.py`, and there is none of this name"),
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
    path.write_text(variant_file() + f"\ndef nothing(): pass\nby_value = {by_value}\n")
    assert main(["predict", *(word.format(path=path) for word in asked)]) == 2
    printed = capsys.readouterr().err
    assert why in printed and printed.count("\n") == 1


def test_predict_finds_the_modules_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "its_neighbour.py").write_text("width = 8")
    (tmp_path / "train.py").write_text(variant_file("its_neighbour.width") + "\nimport its_neighbour\n")
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
