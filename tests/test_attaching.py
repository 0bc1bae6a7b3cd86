"""Training scripts as they are: each kind is a small script, which is predicted whole through the command line.

Most run in forks of a process that has PyTorch loaded; how a process of their own is started is tested with a few.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from effgpu.__main__ import main
from effgpu.attaching import child, scripts
from effgpu.attaching.commands import read_program
from effgpu.attaching.steps import Marks, drive
from effgpu.predicting.prediction import predict

BUILD = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
"""
STEP = """
loss = model(torch.randn(64, 1024).to("cuda")).square().mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""


def loop(build=BUILD, step=STEP, steps=5):
    return f"{build}\nfor number in range({steps}):\n{textwrap.indent(step, '    ')}"


PLAIN = loop()


def function():
    """The step of PLAIN, as a function's."""
    names = {}
    exec(BUILD, names)
    return lambda: exec(STEP, names)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    return tmp_path


SERVER = """
import json, os, sys, torch, torch._dynamo, safetensors.torch
import effgpu.predicting.scripts
from effgpu.attaching import child
for line in sys.stdin:
    asked = json.loads(line)
    if not (pid := os.fork()):
        output = os.open(asked["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(asked["variables"])
        os.chdir(asked["folder"])
        child.main(asked["order"])
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """A process that has PyTorch loaded, and forks: an import takes longer than all else that is tested."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **options) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def forked(monkeypatch, server):
    """Scripts run in forks of the server."""

    def run_fork(program, order, log):
        asked = {"order": str(order), "log": str(log), "folder": os.getcwd(), "variables": program.command.variables}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    monkeypatch.setattr(scripts, "_wait", run_fork)


@pytest.fixture
def run(here, forked, capfd):
    """A function that predicts a script for a T4: gives the exit code, the JSON and what was printed as errors."""

    def run(script, *arguments, gpu="T4", files=()):
        (here / "train.py").write_text(textwrap.dedent(script))
        for name, text in dict(files).items():
            (here / name).parent.mkdir(exist_ok=True)
            (here / name).write_text(text)
        words = arguments or ("python", "train.py")
        code = main(["predict", "--gpu", gpu, "--json", "-", "--", *words])
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def seconds(told):
    return told["gpus"][0]["time"]["expected"]


@pytest.fixture(scope="module")
def expected():
    """Of PLAIN's step, as a function on the same GPU: its peak and its time."""
    predicted = predict(function, "T4")
    return predicted.allocated, predicted.time().expected


AT_ITS_END = """
import atexit, sys
atexit.register(print, "not printed")
try:
{loop}
finally:
    open("late", "w").write("a file of the script's end")
"""
KINDS = {
    "plain": PLAIN,
    "asks": PLAIN.replace('"cuda"', 'torch.device("cuda" if torch.cuda.is_available() else "cpu")'),
    "accelerator": PLAIN.replace('"cuda"', "torch.accelerator.current_accelerator()"),
    "method": PLAIN.replace('.to("cuda")', ".cuda()"),
    "number": PLAIN.replace('.to("cuda")', ".to(0)"),
    "default": "import torch\ntorch.set_default_device('cuda')\n" + PLAIN.replace('.to("cuda")', ""),
    "context": "import torch\nwith torch.device('cuda'):\n" + textwrap.indent(PLAIN.replace('.to("cuda")', ""), "    "),
    "in the main": "def main():\n" + textwrap.indent(PLAIN, "    ") + "\nif __name__ == '__main__': main()",
    "catches all": "try:\n" + textwrap.indent(PLAIN, "    ") + "\nexcept: print('caught')",
    "at its end": AT_ITS_END.format(loop=textwrap.indent(PLAIN, "    ")),
    "compiled module": PLAIN.replace("optimizer =", "model = torch.compile(model)\noptimizer ="),
    "compiled in place": PLAIN.replace("optimizer =", "model.compile()\noptimizer ="),
    "compiled loss": BUILD
    + "\n@torch.compile\ndef lose(out): return out.square().mean()\n"
    + loop("", STEP.replace("loss = model(", "loss = lose(model(").replace(".square().mean()", ")")),
    "optimizer first": PLAIN.replace('.to("cuda")', "", 1).replace("\nfor", "\nmodel.cuda()\nfor"),
    "scheduler": PLAIN.replace("\nfor", "\nscheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\nfor").replace(
        "optimizer.step()", "optimizer.step(); scheduler.step()"
    ),
    "replaced step": PLAIN.replace("\nfor", "\nwhole = optimizer.step\noptimizer.step = lambda: whole()\nfor"),
    "closure": BUILD
    + """
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(64, 1024).to("cuda")).square().mean()
    loss.backward()
    return loss

for number in range(5):
    optimizer.step(closure)
""",
    "workers": BUILD
    + """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(640, 1024))
for (batch,) in DataLoader(data, 64, num_workers=2, pin_memory=True, persistent_workers=True):
    model(batch.to("cuda", non_blocking=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "forked": "import multiprocessing\n"
    + "def work(n):\n    import torch\n    return float(torch.ones(n).sum())\n"
    + "with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(work, [1, 2]) == [1, 2]\n"
    + PLAIN,
    "ticks": "import effgpu\n" + PLAIN.replace("optimizer.zero_grad()", "optimizer.zero_grad(); effgpu.tick(items=64)"),
    "parallel": PLAIN.replace("optimizer =", "model = torch.nn.DataParallel(model)\noptimizer ="),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_predicted_as_its_step_is(kind, run, here, expected):
    code, told, errors = run(KINDS[kind])
    assert code == 0 if "compiled" not in kind else code in (0, 4), errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01 if kind != "closure" else 0.1)
    if "compiled" not in kind:
        assert seconds(told) == pytest.approx(expected[1], rel=0.01)
    assert bool(told["unknown"]) == ("compiled" in kind)
    assert [path.name for path in here.iterdir()] == ["train.py"]
