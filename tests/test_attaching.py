"""Training scripts as they are: each kind is a small script, which is predicted whole through the command line.

Most run in forks of a process that has PyTorch loaded; how a process of their own is started is tested with a few.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from effgpu.__main__ import main
from effgpu.attaching import child, scripts
from effgpu.attaching.commands import read_program
from effgpu.attaching.steps import Marks, drive
from effgpu.diagnosing.doctor import doctor
from effgpu.predicting.kinds import COPY as OVER_BUS
from effgpu.predicting.predict import predict
from effgpu.predicting.timeline import COPY

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
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


SERVER = """
import json, os, sys, torch, torch._dynamo, safetensors.torch
import effgpu.predicting.scripts
from effgpu.attaching import child
from effgpu.predicting.predict import predict

def variant():  # without a backward pass, whose threads a fork has not
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8, device="cuda")).square().mean()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    return optimizer.step

predict(variant, "T4")  # which imports and remembers what every walk needs
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
    """A process that has PyTorch loaded, has walked once, and forks: that takes longer than all else that is tested."""
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
        return code, json.loads(out), err

    return run


def seconds(told):
    """Those of a step; at least, where not all of it is known."""
    time = told["gpus"][0]["time"]
    return time["low"] if time["expected"] is None else time["expected"]


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
    "default": "import torch\ntorch.set_default_device('cuda')\nassert not torch.Tensor(2, 3).is_cuda\n"
    + PLAIN.replace('.to("cuda")', ""),
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
    + "import os\nif not (pid := os.fork()): os._exit(3)\n"
    + "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n"
    + PLAIN,
    "ticks": "import effgpu\n" + PLAIN.replace("optimizer.zero_grad()", "optimizer.zero_grad(); effgpu.tick(items=64)"),
    "spawned": "import torch.multiprocessing\ndef main(rank, device):\n"
    + textwrap.indent(PLAIN.replace('"cuda"', "device"), "    ")
    + "\nif __name__ == '__main__': torch.multiprocessing.spawn(main, ('cuda',), nprocs=1, join=True)\n",
    "parallel": PLAIN.replace("optimizer =", "model = torch.nn.DataParallel(model)\noptimizer ="),
    "types": PLAIN.replace('.to("cuda")', ".type(torch.cuda.FloatTensor)").replace(
        "optimizer =", "assert model[0].weight.type() == 'torch.cuda.FloatTensor'\noptimizer ="
    ),
    "data": PLAIN.replace(
        "optimizer =",
        "for weight in model.parameters(): weight.data = torch.zeros(weight.shape, requires_grad=True).to('cuda')\n"
        "optimizer =",
    ),
    "data on the CPU": PLAIN.replace(
        '.to("cuda")', "; model[0].weight.data = torch.zeros(1024, 1024, requires_grad=True); model.to('cuda')", 1
    ),
    "class of a parameter": PLAIN.replace(
        "optimizer =", "model[0].weight = type(model[0].weight)(torch.zeros(1024, 1024).to('cuda'))\noptimizer ="
    ),
    "keywords": PLAIN.replace(
        "optimizer =",
        "stream, event = torch.cuda.Stream(device=0), torch.cuda.Event(enable_timing=True)\n"
        "with torch.cuda.stream(stream=stream): stream.wait_stream(stream=torch.cuda.current_stream(device=0))\n"
        "event.record(stream=stream); stream.wait_event(event=event); event.elapsed_time(end_event=event)\n"
        "assert torch.cuda.memory_stats(device=0)['allocated_bytes.all.peak'] > 2**25\n"
        "torch.cuda.memory._record_memory_history(max_entries=1); torch.cuda.get_rng_state(device=0)\n"
        "optimizer =",
    ),
    "default type": "import torch\ntorch.set_default_tensor_type('torch.cuda.FloatTensor')\n"
    "assert torch.Tensor(2, 3).is_cuda and torch.Tensor([1e10]).is_cuda and not torch.FloatTensor(2).is_cuda\n"
    + PLAIN.replace('.to("cuda")', ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_predicted_as_its_step_is(kind, run, here, expected):
    code, told, errors = run(KINDS[kind])
    assert code == 0 and not told["unknown"], errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01 if kind != "closure" else 0.1)
    if "compiled" not in kind:
        assert seconds(told) == pytest.approx(expected[1], rel=0.01)
    assert any(each.startswith("compiled code") for each in told["assumptions"]) == ("compiled" in kind)
    assert [path.name for path in here.iterdir()] == ["train.py"]


LOOKS_FIRST = """
import torch
calls = []
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kept, self.number = torch.nn.Linear(1024, 1024), {}, 0
        self.register_buffer("total", torch.zeros(()))
    def forward(self, x, scale=1.0):
        calls.append(torch.is_grad_enabled())
        DOES
        y = self.body(x) * scale
        return {"out": y, "loss": y.square().mean()}
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    if step == AT:
        model.eval()
        with torch.no_grad():
            losses = [model(GETS)["loss"].item() for number in range(20)]
        assert calls.count(False) == CALLS, calls
        model.train()
    model(torch.randn(64, 1024).cuda())["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BATCH = "torch.randn(64, 1024).cuda()"


@pytest.mark.parametrize(
    ("does", "gets", "calls"),
    [
        ("pass", BATCH, 2),
        ("pass", f"{BATCH}, scale=0.5", 2),
        ("pass", BATCH.replace("64", "8 + number % 4"), 8),
        ("pass", f"{BATCH}, scale=number", 20),
        ("pass", f"{BATCH}, scale=torch.tensor(2.0)", 20),
        ("self.number += 1", BATCH, 20),
        ("self.kept[len(calls)] = x", BATCH, 20),
        ("self.total += 1", BATCH, 20),
        ("x = x[: len(calls)]", BATCH, 20),
        ("model.register_forward_hook(lambda *_: None)", BATCH, 20),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 2])  # steps before the evaluation; the third step counts
def test_of_equal_calls_in_an_evaluation_two_are_walked(does, gets, calls, at, run):
    """Unless a call leaves something in the module, gets what is no tensor on the GPU, or gives another size."""
    calls = 20 if at == 2 else calls
    script = LOOKS_FIRST.replace("DOES", does).replace("GETS", gets).replace("CALLS", str(calls))
    script = script.replace("AT", str(at))
    code, told, errors = run(script)
    assert code == 0, errors
    assert "forward passes without gradients" in str(told["notes"]), errors


KEEPS = """
import torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 65536), torch.nn.Linear(65536, 1024)
    def forward(self, x):
        FORWARD
ALL
model = Net().cuda().eval()
kept = []
with torch.no_grad():
    for number in range(6):
        x = torch.randn(2048, 64).cuda()
        EVALUATE
del kept
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    rows = int(torch.randint(1, 1000, ()))
    model.head(torch.randn(rows, 65536).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ALL = "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)"
OUT = "return self.head(self.body(x).relu())"


@pytest.mark.parametrize(
    ("forward", "evaluate"),
    [
        (OUT, "kept.append(model(x))"),
        ("return self.body(x)[-1]", "kept.append(model(x))"),
        ("return self.body(x).chunk(2, -1)", "kept.append(model(x))"),
        ("x['out'] = self.body(x['x'])", "x = {'x': x}; model(x); kept.append(x['out'])"),
        (f"torch.rand([]); {OUT}", "kept.append(model(x))"),
        (
            OUT,
            "model.head = torch.nn.Linear(65536, 1024 + number // 3).cuda(); kept.append(model(x) @ model.head.weight)",
        ),
        (
            OUT,
            "with torch.autocast('cuda', (torch.half, torch.bfloat16)[number // 5]): kept.append(model(x).bfloat16())",
        ),
    ],
    ids=["kept", "a view", "one storage", "in what it gets", "random", "another layer", "another format"],
)
def test_an_evaluation_takes_what_it_takes_where_all_its_calls_are_walked(forward, evaluate, run):
    script = KEEPS.replace("FORWARD", forward).replace("EVALUATE", evaluate)
    (code, told, errors), (_, every, _) = (run(script.replace("ALL", each)) for each in ("", ALL))
    assert code != 1 and told["gpus"][0]["needed"] == every["gpus"][0]["needed"], errors
    times = [seconds(each) for each in (told, every)]
    assert times[0] == times[1] and told["reserved"] == every["reserved"], errors


SHOWS = "\nif {}: print(model[0].weight.detach().cpu().mean())"  # 4 MiB


@pytest.mark.parametrize(("when", "counted"), [("number < 3", False), ("True", True), ("number == 4", False)])
def test_a_step_that_shows_much_counts_only_where_the_next_two_do(when, counted, run, expected):
    (_, told, errors), (peak, time) = run(loop(step=STEP + SHOWS.format(when), steps=7)), expected
    named = any("copied to the CPU only in some steps: train.py" in each for each in told["assumptions"])
    assert named is (when == "number < 3"), told["assumptions"]
    assert (seconds(told) > 1.05 * time) is counted, errors
    assert counted or (told["allocated"], seconds(told)) == (peak, pytest.approx(time, rel=0.01))


def test_the_tracebacks_of_anomaly_mode_are_as_deep_as_in_the_script(run):
    """Deeper by a function that calls another, and less deep than in a notebook, which a function's are taken for."""
    on = "import torch\ntorch.autograd.set_detect_anomaly(True)\n" + PLAIN.replace("1024", "16")
    inside = "def outer(): main()\ndef main():\n" + textwrap.indent(on, "    ") + "\nouter()"
    flat, deep = (seconds(run(script)[1]) for script in (on, inside))
    operations = 8 * 2 + 2  # of a Linear the transposed weight and the product; the square and the mean
    a_call = 20e-6  # seconds on a T4's host
    assert deep - flat == pytest.approx(operations * 2 * 0.4 * a_call)


def test_settings_of_the_allocator_are_named_as_not_followed(run):
    given = "expandable_segments:True,pinned_use_background_threads:True"
    asks = f"import os, torch\nos.environ['PYTORCH_ALLOC_CONF'] = '{given}'\n"
    asks += "torch.cuda.memory._set_allocator_settings('roundup_power2_divisions:[256:1,>:4], max_split_size_mb:64')\n"
    asks += "torch.cuda.set_per_process_memory_fraction(0.5, device=0)\n"
    code, told, errors = run(asks + PLAIN)
    assert code == 0, errors
    assert set(told["assumptions"]) == {
        "memory as without expandable_segments:True, which PYTORCH_ALLOC_CONF asks for",
        "memory as without roundup_power2_divisions:[256:1,>:4] and max_split_size_mb:64, which the code asks for",
        "memory as without per_process_memory_fraction:0.5, which set_per_process_memory_fraction asks for",
    }


def test_a_count_of_right_answers_is_no_size(run):
    right = "right += (loss > 0).sum().item(); print(f'{100. * right / (number + 1):.1f} % {right:d}')\n"
    code, told, errors = run(loop(f"{BUILD}\nright = 0", STEP + right))
    assert code == 0 and not told["unknown"], errors
    assert re.fullmatch(r"train.py:\d+ reads a number, taken as 0", *told["assumptions"])
    _, told, _ = run(loop(f"{BUILD}\nright = 0", STEP + right + "for _ in range(right): model[0].weight.sum()\n"))
    assert any("reads a count, taken as 0" in what for what in told["assumptions"])
    largest = right.replace("(loss > 0).sum()", "model[0].weight.argmax()") + "for _ in range(right): pass\n"
    _, told, _ = run(loop(f"{BUILD}\nright = 0", STEP + largest))
    assert any("no size may depend on it" in why for why in told["unknown"])


def test_what_a_counter_accumulates_is_one_step(run, expected):
    update = "if number % 4 == 3:\n    optimizer.step()\n    optimizer.zero_grad()"
    script = loop(step=STEP.replace("optimizer.step()\noptimizer.zero_grad()", update), steps=20)
    code, told, _ = run(script)
    assert code == 0 and told["owners"]["optimizer state"] > 2 * 8 * 4 * 1024**2
    assert 2 * expected[1] < seconds(told) < 4 * expected[1], "four passes, one update"


def test_an_average_by_deep_copy_lies_beside_the_model(run, expected):
    code, told, _ = run(PLAIN.replace("optimizer =", "import copy\naverage = copy.deepcopy(model)\noptimizer ="))
    assert code == 0 and told["allocated"] == pytest.approx(expected[0] + 8 * 4 * 1024 * 1025, rel=0.01)


def test_a_deep_copy_takes_what_a_module_holds_beside_its_weights_along(run, expected):
    """yolov5's models hold the strides of their layers."""
    held = "import copy\nmodel.stride = torch.tensor([8.0, 16.0])\naverage = copy.deepcopy(model)\n"
    code, told, errors = run(
        PLAIN.replace("optimizer =", held + "assert average.stride.tolist() == [8, 16]\noptimizer =")
    )
    assert code == 0 and told["allocated"] == pytest.approx(expected[0] + 8 * 4 * 1024 * 1025, rel=0.01), errors


# After https://github.com/sthalles/SimCLR: all masks come from an arange, none from what the model gives.
CHOOSES_BY_KNOWN_MASKS = """
made = model(torch.randn(512, 1024).to("cuda"))
same = torch.arange(256).repeat(2)
same = (same[None] == same[:, None]).float().to("cuda")
others = ~torch.eye(512, dtype=torch.bool).to("cuda")
likeness, same = (made @ made.T)[others].view(512, -1), same[others].view(512, -1)
assert likeness[same.bool()].view(512, -1).shape == (512, 1)
assert likeness[~same.bool()].view(512, -1).shape == (512, 510)
likeness.mean().backward()
optimizer.step()
"""


def test_what_known_masks_choose_is_known(run):
    code, told, errors = run(loop(step=CHOOSES_BY_KNOWN_MASKS))
    assert code == 0 and not told["assumptions"] and not told["unknown"], errors


def test_an_error_names_what_was_guessed_before_it(run):
    step = "made = model(torch.randn(64, 1024).to('cuda'))\nmade[made > 0].view(64, 100)\n"
    code, told, errors = run(loop(step=step + STEP))
    assert (code, list(told)) == (1, ["failed"]) and "Traceback" in errors
    last = errors.splitlines()[-1]
    assert "'[64, 100]' is invalid" in last and last.endswith(
        "not known here: train.py:8 takes 50% of what it chooses from by value (taken=0.5) (train.py:8)"
    )


def test_an_error_names_nothing_of_which_only_the_time_is_not_known(run):
    step = "made = model(torch.randn(64, 1024).to('cuda'))\ntorch.fft.rfft(made)\n"
    step += "made.view(63 + 65473 * (number < 2))\n"
    code, _, errors = run(loop(step=step + STEP))
    assert code == 1 and "'[63]' is invalid" in errors and "not known here" not in errors


TRITON = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"SIZE": 1024})], key=["count"])
@triton.jit
def double(read, written, count, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(written + places, 2 * tl.load(read + places, places < count), places < count)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        written = torch.empty_like(x)
        double[lambda given: (triton.cdiv(x.numel(), given["SIZE"]),)](x, written, x.numel())
        return written

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
"""


def test_a_kernel_of_tritons_is_not_run_and_takes_what_it_touches(run):
    pytest.importorskip("triton")
    double = STEP.replace("loss = model(torch.randn(64, 1024)", "loss = model(Double.apply(torch.randn(64, 1024)")
    script = loop(TRITON + BUILD, double.replace('.to("cuda"))', '.to("cuda")))'))
    code, told, errors = run(script)
    plain, kinds = (each["gpus"][0]["time"]["kinds"] for each in (run(PLAIN)[1], told))
    assert code == 0, errors
    assert told["unknown"] == ["how long the Triton kernel double computes: only what it reads and writes"]
    more = kinds["other operations"]["bytes"] - plain["other operations"]["bytes"]
    assert more == 2 * 4 * 64 * 1024 and kinds["matrix products"] == plain["matrix products"]


def test_a_host_copy_takes_no_memory_of_the_gpu(run, expected):
    script = PLAIN.replace("optimizer =", "import copy\naverage = copy.deepcopy(model).cpu()\noptimizer =")
    code, told, _ = run(script.replace("number in", "number in average[0].weight.device.type == 'cpu' and"))
    assert code == 0 and told["allocated"] == pytest.approx(expected[0], rel=0.01)


def test_what_a_second_optimizer_does_is_in_the_step_of_the_first(run):
    build = "other = torch.nn.Linear(1024, 1, bias=False).cuda()\nsecond = torch.optim.SGD(other.parameters())\n"
    step = "other(model(torch.randn(64, 1024).cuda()).detach()).mean().backward()\nsecond.step()\nsecond.zero_grad()\n"
    kernels = [
        run(loop(BUILD + build, order))[1]["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"]
        for order in (STEP, STEP + step, step + STEP)
    ]
    assert kernels[0] == 3 * 8 - 1 and kernels[1] == kernels[2] == kernels[0] + 8 + 2


def test_an_optimizer_that_made_no_step_in_those_that_were_looked_at_is_named(run):
    build = "other = torch.nn.Linear(8, 8).cuda()\nsecond = torch.optim.SGD(other.parameters())\n"
    sometimes = "if number == 4: second.step()\n"
    (why,) = run(loop(BUILD + build, STEP + sometimes))[1]["unknown"]
    assert re.fullmatch(r"what the SGD of train.py:\d+ takes, which made no step in those that were looked at", why)
    pattern = "second = torch.optim.SGD(model[0].parameters(), 0.1)\n"
    assert not run(loop(BUILD + pattern, STEP + sometimes))[1]["unknown"], (
        "it trains what the other does, and keeps nothing"
    )


# --- what a script reads of its batch, and loops that end by values ---


def test_views_of_a_batch_take_no_memory_of_their_own(run):
    batch = STEP.replace("loss = model(torch.randn(64, 1024).to", "batch = torch.randn(64, 1024).to", 1)
    batch = batch.replace(
        ").square().mean()", "\nviews = [batch.view(-1), batch.t(), batch[:32], batch.detach()]\nX", 1
    )
    batch = batch.replace("X", "loss = model(batch).square().mean()")
    plain, viewed = (run(loop(BUILD, step)) for step in (batch.replace("views =", "0 and"), batch))
    assert plain[0] == viewed[0] == 0 and plain[1]["allocated"] == viewed[1]["allocated"], viewed[2]


def test_what_is_made_by_its_size_on_the_cpu_is_real(run):
    numbers = "ids = torch.LongTensor(5)\nfor place in range(5): ids[place] = place\nassert ids.sum().item() == 10\n"
    pinned = 'assert torch.empty(3, pin_memory=True).is_pinned() and torch.ByteTensor(2).device.type == "cpu"\n'
    layer = """
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.Tensor(1024, 1024).uniform_())
            assert self.weight.device.type == torch.FloatTensor(2).device.type == "cpu"
    assert Layer().cuda().weight.is_cuda
    """
    code, told, errors = run(loop(BUILD + numbers + pinned + textwrap.dedent(layer)))
    assert code == 0 and not told["unknown"], errors


def test_labels_that_come_back_from_the_gpu_are_known(run):
    labels = """
    labels = (torch.arange(64) % 4).cuda()
    assert labels.cpu().numpy().max() == 3 and labels.tolist()[:5] == [0, 1, 2, 3, 0] and len(labels.unique()) == 4
    guessed = model(torch.randn(64, 1024).cuda())[:, :10].argmax(1)
    assert len(torch.unique(guessed.flatten())) <= 10 and len(torch.unique(guessed > 3)) <= 2
    """
    code, told, errors = run(loop(BUILD, textwrap.dedent(labels) + STEP))
    assert code == 0 and not told["unknown"], errors


def test_an_array_that_nobody_knows_is_taken_as_ones_where_an_error_follows_zeros(run):
    found = "found = model(torch.randn(2, 1024).cuda()).cpu().detach().numpy().astype(int)[0, 0]\n"
    code, told, errors = run(loop(BUILD, f"{found}1 // int(found)\n{STEP}"))
    assert code == 0 and not told["unknown"], errors
    assert any(re.fullmatch(r"train.py:\d+ reads an array, taken as ones", what) for what in told["assumptions"])
    code, _, errors = run(loop(BUILD, f"{found}1 // int(found * (found - 1))"))
    assert code == 1 and re.search(
        r"ZeroDivisionError.*; not known here: train.py:\d+ reads an array, taken as zeros", errors
    )


def test_whole_numbers_by_which_sizes_are_divided_are_not_known(run):
    folded = """
    x = model(torch.randn(2, 1024).cuda())
    for period in map(int, 1024 // x.mean(0).topk(3).indices.cpu().numpy()):
        torch.nn.functional.pad(x, (0, -1024 % period)).view(2, -1, period)
    """
    code, told, errors = run(loop(BUILD, textwrap.dedent(folded) + STEP))
    assert code == 0, errors
    assert re.search(r"train.py:\d+ reads whole numbers, taken as ones: no size may depend on them", told["unknown"][0])


def test_a_model_built_without_memory_gets_its_weights_on_the_gpu(run, expected):
    layers = "torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))"
    build = f'import torch\nwith torch.device("meta"): model = {layers}\nmodel.to_empty(device="cuda")\n'
    code, told, errors = run(loop(f"{build}optimizer = torch.optim.AdamW(model.parameters())"))
    assert code == 0 and told["allocated"] == pytest.approx(expected[0], rel=0.01), errors


def test_a_decoder_that_stops_at_a_token_goes_on(run):
    stops = "for _ in range(5):\n    if model(torch.randn(64, 1024).cuda()).argmax().item() == 1: break\n"
    code, told, errors = run(loop(BUILD, stops + STEP))
    assert code == 0 and told["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"] == 5 * 8 + 3 * 8 - 1, errors
    assert [re.sub(r"\d+", "", why) for why in told["unknown"]] == ["train.py: decides by a value, taken as False"]


def test_an_optimizer_that_shares_its_groups_with_another_is_not_idle(run):
    sharing = "outer = torch.optim.SGD(model.parameters(), 0.1)\nouter.param_groups = optimizer.param_groups\n"
    assert run(loop(BUILD + sharing))[1]["unknown"] == []


def test_how_long_sparse_gradients_take_is_not_known(run):
    build = (
        BUILD
        + "rows = torch.nn.Embedding(1000, 8, sparse=True).cuda()\nown = torch.optim.SparseAdam(rows.parameters())\n"
    )
    step = STEP + "rows(torch.arange(9).cuda()).sum().backward()\nown.step()\nown.zero_grad()\n"
    assert run(loop(build, step))[1]["unknown"] == ["how long the SparseAdam takes for sparse gradients"]


MAKES_ITS_STEP = """
class Learner(torch.nn.Module):
    def forward(self, x):
        made = x * 2
        with torch.no_grad(): model(x)
        made = None
        with torch.no_grad(): print(model[0].weight.sum().item())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
learner = Learner()
"""


def test_what_a_method_lets_go_is_not_kept_by_looking_at_it(run):
    code, told, errors = run(loop(BUILD + MAKES_ITS_STEP, "learner(torch.randn(4096, 1024).cuda())"))
    assert code == 0 and not told["warnings"], errors


def test_memory_that_grows_is_a_warning_for_programs_too(run):
    code, told, _ = run(loop(BUILD + "kept = []\n", STEP + "kept.append(model(torch.randn(64, 1024).cuda()))\n"))
    (warning,) = told["warnings"]
    assert not any("steps differ" in one for one in told["assumptions"]), "it is not that the step grows"
    assert code == 0 and re.search(r"^memory grows by .*; if it is no buffer that fills up, the T4 is full", warning)


def test_two_numbers_that_nobody_knows_are_not_equal(run):
    first, second = (f"model[{place}].weight.argmax().item()" for place in (0, 1))
    told = run(loop(BUILD, f"if {first} == {second}: model(torch.randn(9, 1024).cuda())\n" + STEP))[1]
    assert told["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"] == 3 * 8 - 1


def test_an_optimizer_that_steps_in_the_backward_pass_leaves_nothing(run):
    build = """
    import torch
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("cuda")
    optimizers = {weight: torch.optim.Adam([weight], foreach=False) for weight in model.parameters()}
    def hook(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()
    for weight in model.parameters(): weight.register_post_accumulate_grad_hook(hook)
    """
    code, told, errors = run(loop(textwrap.dedent(build), STEP.split("optimizer")[0]))
    assert code == 0 and not told["unknown"] and not told["warnings"], errors


NAMED = """
class Named(torch.Tensor):
    def double(self):
        assert self.source == "camera"
        return 2 * self
batch = {made}
batch.source = "camera"
"""
DISPATCHED = """
class Named(torch.Tensor):
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        made.inner = inner
        return made
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))
batch = Named(torch.ones(64, 1024))
"""


NAMED_STEP = """
moved = batch.to("cuda")
output = model(moved.double())
assert type(output).__name__ == "Named" and output.is_cuda
assert type(moved.as_subclass(torch.Tensor)) is not type(moved)
output.square().mean().backward()
optimizer.step()
optimizer.zero_grad()
"""


@pytest.mark.parametrize("made", ["torch.ones(64, 1024).as_subclass(Named)", "Named(torch.ones(64, 1024))"])
def test_a_tensor_keeps_its_class_and_what_it_holds_on_the_gpu(made, run):
    code, told, errors = run(loop(BUILD + NAMED.format(made=made), NAMED_STEP))
    assert code == 0 and not told["unknown"], errors


@pytest.mark.parametrize("made", ["torch.ones(64, 1024)", "Named(torch.ones(64, 1024))"])
def test_a_tensor_that_is_given_the_data_of_one_on_the_gpu_is_there(made, run, expected):
    named = NAMED.format(made=made) + "batch.data = batch.cuda()\nassert batch.is_cuda and batch.source == 'camera'\n"
    code, told, errors = run(loop(BUILD + named, STEP.replace("torch.randn(64, 1024)", "batch.normal_()")))
    assert code == 0 and not told["unknown"] and seconds(told) == pytest.approx(expected[1], rel=0.02), errors


def test_data_parallel_moves_a_tensor_without_its_classs_own_method(run, expected):
    own = "class Own(torch.Tensor):\n    def to(self, *_): raise KeyError\nmodel = torch.nn.DataParallel(model)\n"
    step = STEP.replace('torch.randn(64, 1024).to("cuda")', "torch.randn(64, 1024).as_subclass(Own)")
    code, told, errors = run(loop(BUILD + own, step))
    assert code == 0 and told["allocated"] == pytest.approx(expected[0], rel=0.01), errors


def test_what_a_class_does_with_operations_on_the_gpu_is_not_known(run):
    code, told, errors = run(loop(BUILD + DISPATCHED, STEP.replace("torch.randn(64, 1024)", "batch")))
    assert code == 0, errors
    assert told["unknown"] == ["what Named does on the GPU that a plain tensor does not"]


def test_a_script_that_trains_on_the_cpu_is_refused_after_its_first_step(run, here):
    step = "open('steps', 'a').write('x')\n" + STEP.replace('.to("cuda")', "")
    code, _, errors = run(loop(BUILD.replace('.to("cuda")', ""), step))
    assert code == 2 and "trains on the CPU" in errors and (here / "steps").read_text() == "x"


def test_a_script_that_trains_on_the_cpu_is_refused_before_its_first_update(run, here):
    closure = "def closure():\n    open('passes', 'w').write('x')\n    return model(torch.randn(64, 1024)).sum()\n"
    build = BUILD.replace('.to("cuda")', "").replace("AdamW", "LBFGS")
    code, _, errors = run(loop(build + closure, "optimizer.step(closure)"))
    assert code == 2 and re.search(r"trains on the CPU: .* \(train.py:\d+\)", errors) and not (here / "passes").exists()


def test_without_an_optimizer_of_pytorchs_a_step_goes_from_one_backward_pass_to_the_next(run):
    by_hand = "with torch.no_grad():\n    for weight in model.parameters(): weight -= weight.grad; weight.grad = None"
    build = BUILD.replace("optimizer = torch.optim.AdamW(model.parameters())", "")
    code, told, errors = run(loop(build, STEP.replace("optimizer.step()\noptimizer.zero_grad()", by_hand)))
    assert code == 0 and told["notes"] == [
        "no optimizer of PyTorch's: a step is counted from one backward pass to the next"
    ], errors
    assert told["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"] == 3 * 8 - 1
    weights = 8 * 4 * 1024 * 1025
    assert told["owners"]["weights"] == told["owners"]["gradients"] == pytest.approx(weights, rel=0.01)
    large = STEP.replace("optimizer.step()\noptimizer.zero_grad()", by_hand).replace("64, 1024", "8192, 1024")
    _, told, _ = run(loop(build, large))
    assert told["owners"]["activations"] >= 8 * 4 * 8192 * 1024 and not told["owners"]["gradients"]


def test_what_another_librarys_optimizer_keeps_is_no_activation_and_no_step_of_another_size(run):
    momentum = "weight.data -= state[weight].add_(weight.grad); weight.grad = None"
    build = BUILD.replace("optimizer = torch.optim.AdamW(model.parameters())", "state = {}")
    made = "if not state: state = {weight: torch.zeros_like(weight) for weight in model.parameters()}"
    by_hand = f"{made}\nfor weight in model.parameters(): {momentum}"
    code, told, errors = run(loop(build, STEP.replace("optimizer.step()\noptimizer.zero_grad()", by_hand)))
    assert code == 0 and not told["assumptions"], errors
    weights = 8 * 4 * 1024 * 1025
    assert told["owners"]["other"] >= weights and told["owners"]["activations"] < 16 * 64 * 1024 * 4


def test_a_model_that_is_drawn_or_traced_runs_as_it_is(run, here, expected):
    (here / "tensorboardX").mkdir()
    (here / "tensorboardX" / "__init__.py").write_text("from .writer import SummaryWriter")
    traces = "class SummaryWriter:\n    def add_graph(self, model, given): torch.jit.trace(model, given).graph\n"
    (here / "tensorboardX" / "writer.py").write_text(f"import torch\n{traces}")
    draws = "import tensorboardX\ntensorboardX.SummaryWriter().add_graph(model, torch.randn(64, 1024).cuda())\n"
    traced = "model = torch.jit.trace(model, torch.randn(64, 1024).cuda())\n"
    own = "model.save = [3]\nassert torch.jit.trace(model.forward, torch.randn(64, 1024).cuda()).save == [3]\n"
    as_is = ["traced code takes what it takes without torch.jit.trace"]
    for build, said in ((draws, []), (traced, as_is), (own, as_is)):
        code, told, errors = run(loop(BUILD + build))
        assert code == 0 and seconds(told) == pytest.approx(expected[1], rel=0.01), errors
        assert told["assumptions"] == said and not told["unknown"]


BLURS = """
from torch.utils.data import DataLoader
blur = torch.nn.Conv2d(1, 1, 3, padding=1)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 640
    @torch.no_grad()
    def __getitem__(self, place): return torch.ones(1024) * blur(torch.ones(1, 32, 32)).numpy().max().item()
batches = iter(DataLoader(Data(), 64))
"""


def test_what_a_loader_computes_is_no_evaluation(run, expected):
    slow = "from effgpu.attaching import ticking\nfrom effgpu.predicting import placing\nplacing.LONG = 0.0\n"
    step = "batch = next(batches)\nassert not ticking._script.slowed\n" + STEP.replace("torch.randn(64, 1024)", "batch")
    code, told, errors = run(loop(slow + BUILD + BLURS, step))
    assert code == 0 and seconds(told) == pytest.approx(expected[1], rel=0.01), errors
    assert not told["notes"]


EVALUATED = """
@torch.inference_mode()
def evaluate():
    for _ in range(3):
        high = model(torch.randn(64, 1024).to("cuda")).max()
        if high.item() > 0 or model[0].weight.sum() > 0: print("high")
    return high
with torch.no_grad(): float(evaluate())
"""


def test_an_evaluation_before_the_step_is_told_and_is_no_part_of_it(run, expected, monkeypatch):
    script = loop(BUILD + EVALUATED, STEP + "if number == 0: evaluate()\n")
    code, told, errors = run(script)
    assert code == 0 and told["unknown"] == told["assumptions"] == [], errors
    assert seconds(told) == pytest.approx(expected[1], rel=0.01)
    assert seconds(run(loop(BUILD + EVALUATED, STEP + "evaluate()\n"))[1]) > 1.1 * expected[1]
    sometimes = "if number % 2: model.eval(); evaluate(); model.train()\n"
    assert seconds(run(loop(BUILD + EVALUATED, STEP + sometimes))[1]) == pytest.approx(expected[1], rel=0.01)
    slow = "from effgpu.attaching import ticking\nfrom effgpu.predicting import placing, scripts\n"
    slow += "placing.LONG = scripts.LONG = 0.001\n"
    waits = "assert ticking._script.slowed.endswith('let the script run fewer') == (number == 0)\n"
    (note,) = run(slow + script.rstrip() + "\n" + textwrap.indent(waits, "    "))[1]["notes"]
    assert re.fullmatch(
        r"forward passes without gradients .* are not counted: .*; they took \d.* here: let the script run fewer", note
    )
    rollout = "for _ in range(20): evaluate()\nfor _ in range(4):\n" + textwrap.indent(STEP, "    ")
    (note,) = run(loop(BUILD + EVALUATED, rollout))[1]["notes"]
    assert note.endswith("such as an evaluation's, a rollout's or a reference model's")
    within = EVALUATED.replace("with torch.no_grad(): float(evaluate())", "")
    assert not run(loop(BUILD + within, "evaluate()\n" + STEP))[1]["notes"], "a part of each step"


def test_a_vocabulary_that_grows_before_the_training_is_no_evaluation_and_leaves_nothing_open(run):
    build = """import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=1, n_head=2))
model.resize_token_embeddings(101)
model.cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
    step = "texts = torch.randint(100, (2, 8)).cuda()\nmodel(texts, labels=texts).loss.backward()\noptimizer.step()\n"
    code, told, errors = run(loop(build, step))
    assert code == 0 and told["unknown"] == told["notes"] == [], errors
    assert all("checks a value, taken as passed" in each for each in told["assumptions"])


def test_a_checkpoint_without_gradients_is_no_evaluation(run):
    slow = "import effgpu.predicting.scripts as scripts\nscripts.LONG = 0.001\n"
    slow += "from torch.utils.checkpoint import checkpoint\n"
    whole = STEP.replace("model(torch.randn(64, 1024)", "checkpoint(model, torch.randn(64, 1024, requires_grad=True)")
    code, told, errors = run(slow + loop(step=whole.replace('.to("cuda"))', '.to("cuda"), use_reentrant=True)')))
    assert code == 0 and not told["notes"], errors
    assert told["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"] == 4 * 8


def test_a_closure_is_no_part_of_the_optimizers_work(run):
    kinds = [run(KINDS[kind])[1]["gpus"][0]["time"]["kinds"] for kind in ("plain", "closure")]
    assert kinds[0]["optimizer"]["kernels"] == kinds[1]["optimizer"]["kernels"]


def test_lbfgs_calls_its_closure_within_a_step(run):
    script = KINDS["closure"].replace("AdamW(model.parameters())", "LBFGS(model.parameters(), max_iter=5)")
    _, told, errors = run(script + "    assert optimizer.param_groups[0]['tolerance_change'] == 1e-9")
    assert told["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"] == 5 * (3 * 8 - 1), errors
    assert told["assumptions"] == [
        "LBFGS calls its closure as often as it may, 5 times",
        "LBFGS keeps as many of its directions as it may, 100",
    ]
    most = 2 * 100 * 8 * 4 * 1024 * 1025  # two vectors for each direction, and some for the step itself
    assert most < told["owners"]["optimizer state"] < 1.05 * most and not told["warnings"]


@pytest.mark.parametrize(
    ("more", "calls"), [("max_eval=3", 3), ("max_iter=4", 4), ("max_iter=4, line_search_fn='strong_wolfe'", 6)]
)
def test_the_calls_of_lbfgs_are_those_that_it_may_make(more, calls, run):
    _, told, errors = run(KINDS["closure"].replace("AdamW(model.parameters())", f"LBFGS(model.parameters(), {more})"))
    assert told["gpus"][0]["time"]["kinds"]["matrix products"]["kernels"] == calls * (3 * 8 - 1), errors
    assert told["assumptions"][0] == f"LBFGS calls its closure as often as it may, {calls} times"


def test_a_whole_training_in_one_step_of_lbfgs_is_refused(run):
    code, _, errors = run(
        KINDS["closure"].replace("AdamW(model.parameters())", "LBFGS(model.parameters(), max_iter=5000)")
    )
    assert code == 2 and "LBFGS calls its closure up to 5,000 times in a step: give it a smaller max_iter" in errors


BUILT_ON_THE_CPU = """
import torch
layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(16)))
assert all(parameter.device.type == "cpu" for parameter in layers.parameters())
model = layers.to(torch.bfloat16).to("cuda").requires_grad_(False)
assert next(model.parameters()).is_cuda and next(model.parameters()).device == torch.device("cuda", 0)
model[-1].requires_grad_(True)
optimizer = torch.optim.SGD(model[-1].parameters(), 0.1)
for number in range(4):
    model(torch.zeros(8, 4096, device="cuda", dtype=torch.bfloat16)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_that_is_cast_before_it_moves_takes_the_gpus_memory_once(run):
    code, told, errors = run(BUILT_ON_THE_CPU, gpu="A100")
    assert code == 0, errors
    assert told["owners"]["weights"] == 16 * 2 * 4096**2 and told["reserved"]["high"] < 1.3 * told["allocated"]


def test_a_model_of_any_size_takes_no_memory_here(run):
    """Ten billion weights, which nobody has room for: 40 GB, four times with their gradients and AdamW's state."""
    code, told, errors = run(PLAIN.replace("1024", "100_000").replace("range(8)", "range(1)"))
    assert code == 3 and told["owners"]["weights"] > 4 * 10**10, errors


SMALL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        assert abs(rates[-1] - 0.3) < 1e-6
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        self.register_buffer("scale", torch.ones(3))
    def forward(self, batch):
        assert self.scale.is_cuda and self.scale.get_device() == 0 and batch.get_device() == 0
        return self.layers(batch) * self.scale[0]
model = Model().to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
count = torch.tensor(3).to("cuda")
assert count.item() == 3 and float(count * 2) == 6
labels = torch.arange(10).to("cuda")
assert labels.min() >= 0 and labels.max().item() < 10 and (labels < 10).all()
assert len(labels[labels > 3]) == 6 and labels.tolist() == list(range(10))
labels += 1
"""


def test_small_values_that_a_model_reads_while_it_is_built_are_real(run):
    code, told, errors = run(loop(SMALL))
    assert code == 0 and not told["unknown"], errors


# --- packages, launchers, arguments ---


def test_modules_of_a_package_with_their_arguments(run, expected):
    package = "from . import width\nimport argparse\nparser = argparse.ArgumentParser()\n"
    package += "parser.add_argument('--rows', type=int)\nrows = parser.parse_args().rows\n"
    files = {
        "package/__init__.py": "width = 1024",
        "package/train.py": package + PLAIN.replace("64, 1024", "rows, width"),
    }
    code, told, errors = run("", "python", "-m", "package.train", "--rows", "64", files=files)
    assert code == 0, errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01)


def test_click_reads_its_arguments(run):
    start = "import click\n@click.command()\n@click.option('--rows', default=4)\ndef main(rows):\n"
    script = start + textwrap.indent("assert rows == 64\n" + PLAIN, "    ") + "\nmain()"
    for words in (("train.py", "--rows=64"), ("python train.py --rows 64",)):
        code, _, errors = run(script, *words)
        assert code == 0, errors


RANKED = """
import os, torch
from torch.nn.parallel import DistributedDataParallel as DDP
torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
assert torch.distributed.get_world_size() == 1
"""


@pytest.mark.parametrize("launcher", ["torchrun --standalone --nproc_per_node=1", "python -m torch.distributed.run"])
def test_torchrun_with_one_process(launcher, run, expected):
    script = RANKED + PLAIN.replace("optimizer =", "model = DDP(model, device_ids=[0])\noptimizer =")
    code, told, errors = run(script, *launcher.split(), "train.py")
    assert code == 0, errors
    assert told["allocated"] == pytest.approx(expected[0] + 8 * 4 * 1024 * 1025, rel=0.01), "the buckets"


DISTRIBUTED = """
import torch
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

def variant():
    init_process_group("nccl", rank=0, world_size=1)
    model = DDP(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("cuda"), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(64, 1024).to("cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


def test_a_function_of_a_file_that_has_imported_ddp_before_is_the_only_rank(here, expected, monkeypatch):
    (here / "ranked.py").write_text(DISTRIBUTED)
    monkeypatch.syspath_prepend(here)
    import ranked

    try:
        predicted = predict(ranked.variant, "T4")
    finally:
        torch.distributed.destroy_process_group()
    assert predicted.allocated == pytest.approx(expected[0] + 8 * 4 * 1024 * 1025, rel=0.01), "the buckets"
    assert ranked.DDP is torch.nn.parallel.DistributedDataParallel


# --- what is refused, and what fails ---

CHILD = "import multiprocessing\ndef train():\n" + textwrap.indent(PLAIN, "    ")
CHILD += "\nif __name__ == '__main__':\n    process = multiprocessing.get_context('METHOD').Process(target=train)\n"
CHILD += "    process.start(); process.join()\n"
REFUSED = {
    "too short": (loop(steps=2), "ended after 2 steps, and 3 are needed"),
    "no training": ("import torch", "without a step of an optimizer"),
    "exits early": (loop(steps=1) + "\nraise SystemExit", "ended after a step"),
    "on the CPU": (PLAIN.replace('.to("cuda")', ""), "trains on the CPU"),
    "ranks": (
        "import torch\ntorch.distributed.init_process_group('nccl', world_size=2, rank=0)",
        r"asks for 2 ranks, .* \(.*train.py:2\)",
    ),
    "spawned ranks": ("import torch\ntorch.multiprocessing.spawn(print, nprocs=2)", "asks for 2 ranks"),
    "a forked child": (CHILD.replace("METHOD", "fork"), "let the first process train"),
    "a spawned child": (CHILD.replace("METHOD", "spawn").replace("process.join()", "process.kill()"), "let the first"),
    "a launcher": (
        "import subprocess, sys\nsubprocess.run(['true'])\nsubprocess.run([sys.executable, 'jax.py', '--batch', '8'])",
        "started another program that may train: give that one, .*python.* jax.py --batch 8",
    ),
    "another framework": ("import jax", "uses JAX: only training with PyTorch"),
    "by values": (
        PLAIN.replace("loss.backward()", "torch.bincount(loss.long().view(1))\n    loss.backward()"),
        r"the shape of a result depends on values.*train.py:9\)",
    ),
    "by values, caught": (
        PLAIN.replace("loss.backward()", "try: torch.bincount(loss.long().view(1))\n    except Exception: break"),
        "the shape of a result depends on values",
    ),
    "no fake kernel": (
        PLAIN.replace(
            "optimizer =",
            "@torch.library.custom_op('mine::double', mutates_args=())\n"
            "def double(x: torch.Tensor) -> torch.Tensor: return 2 * x\noptimizer =",
        ).replace("loss = model(", "loss = (lambda batch: double(model(batch)))("),
        "mine[:.]+double",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_predicted_is_refused_in_one_sentence(kind, run):
    script, why = REFUSED[kind]
    code, told, errors = run(script, files={"jax.py": ""})
    before, said, *_ = errors.splitlines()
    assert code == 2 and before.startswith("effgpu: runs") and errors.count("\n") == 2, errors
    assert said == f"effgpu: error: {told['failed']}"
    assert re.search(f"effgpu: error: train.py:? .*{why}", said), errors


@pytest.mark.parametrize(
    "words, why",
    [
        ("torchrun --nproc-per-node 2 train.py", "--nproc_per_node: one process is predicted.*`python train.py`"),
        ("accelerate launch --multi_gpu train.py", "--multi_gpu: one process"),
        ("accelerate launch --num_processes=4 train.py", "--num_processes: one process"),
        ("accelerate test", "only `accelerate launch`"),
        ("WORLD_SIZE=2 python train.py", "WORLD_SIZE is 2"),
        ("WORLD_SIZE= python other.py", "other.py: expected a Python file"),
        ("python other.py", "other.py: expected a Python file"),
        ("python -c pass", "got -c"),
        ("ls -l", "ls: expected a Python program"),
        ("python2000 train.py", "there is no program 'python2000'"),
    ],
)
def test_a_command_that_starts_no_single_python_program_is_refused(words, why, here, capsys):
    (here / "train.py").touch()
    assert main(["predict", "--", *words.split()]) == 2
    assert re.search(why, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words, argued",
    [
        ("train.py --a 1", ("train.py", False, ("--a", "1"))),
        ("python -u -W ignore train.py -m x", ("train.py", False, ("-m", "x"))),
        ("python -m package.train --a", ("package.train", True, ("--a",))),
        ("torchrun --nnodes 1 --nproc_per_node 1 train.py --a", ("train.py", False, ("--a",))),
        ("torchrun --standalone -m package.train", ("package.train", True, ())),
        ("python -m torch.distributed.launch --use_env train.py --a 0.9", ("train.py", False, ("--a", "0.9"))),
        ("python -m torch.distributed.launch train.py --a", ("train.py", False, ("--local-rank=0", "--a"))),
        ("accelerate launch --mixed_precision fp16 --cpu train.py --a", ("train.py", False, ("--a",))),
    ],
)
def test_what_a_command_runs(words, argued, here):
    (here / "train.py").touch()
    program = read_program(words)
    assert (program.name, program.is_module, program.arguments) == argued
    assert program.python[1:] == (("-u", "-W", "ignore") if "-u " in words else ())
    assert ("RANK" in program.command.variables) == ("torch" in words)
    assert ("ACCELERATE_MIXED_PRECISION" in program.command.variables) == ("--mixed_precision" in words)


@pytest.mark.parametrize(
    "script, why",
    [
        ("print('so far')\nint('a')", "train.py failed before its first step: ValueError: .* \\(.*train.py:2\\)"),
        (
            PLAIN.replace("loss.b", "int('a'); loss.b"),
            "train.py failed before its first step: ValueError: .*train.py:9\\)",
        ),
        ("raise RuntimeError('predict: no weights')", "train.py failed .*: predict: no weights \\(.*train.py:1\\)"),
        ("import sys\nsys.exit(3)", "train.py ended itself before its first step \\(exit code 3\\)"),
        ("raise SystemExit('no')", "train.py ended itself before .* \\(exit code 1\\), see its message above"),
    ],
)
def test_a_script_that_fails_shows_its_own_traceback(script, why, run):
    code, told, errors = run(script)
    assert (code, list(told)) == (1, ["failed"])
    assert re.fullmatch(f"effgpu: error: {why}", errors.splitlines()[-1])
    if "int" in script:
        assert "Traceback" in errors and "ValueError: invalid literal" in errors and "/effgpu/" not in errors
        assert ("so far" in errors) == ("so far" in script)


def test_of_an_error_inside_of_pytorch_the_scripts_own_lines_are_shown(run):
    code, _, errors = run(PLAIN.replace("loss.b", "model(torch.ones(2, 3).cuda()); loss.b"))
    *_, call, error, last = errors.splitlines()
    assert code == 1 and "fake_tensor" not in errors and "_meta_registrations" not in errors, errors
    assert set(call) <= set(" ~^") and error.startswith("RuntimeError: ") and re.search(r"\(.*train.py:9\)$", last)


def test_of_a_long_line_that_a_script_that_fails_has_written_the_beginning_is_shown(run):
    code, _, errors = run("print('batch', [0] * 9999)\nint('a')")
    (shown,) = [line for line in errors.splitlines() if line.startswith("batch")]
    assert code == 1 and len(shown) < 400 and shown.endswith("0, ...")


def test_of_many_lines_that_a_script_that_fails_has_written_the_last_are_shown_and_how_many_came_before(run):
    code, _, errors = run("for number in range(300): print('batch', number)\nraise SystemExit(3)")
    assert code == 1 and "[lines of its output before these: 280]\nbatch 280\n" in errors
    assert "batch 279" not in errors and "batch 299" in errors


REFUSES = """
import contextlib
from effgpu.errors import BadArgument

@contextlib.contextmanager
def planned(marks):
    def plan():
        raise BadArgument("the step works on GPUs 0, 1")
        yield
    yield plan
"""


def test_what_a_plan_itself_refuses_is_no_failure_of_the_script(here, forked):
    (here / "plans.py").write_text(REFUSES)
    (here / "train.py").write_text("import torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)]).step()")
    with pytest.raises(RuntimeError, match=r"^train.py: the step works on GPUs 0, 1$"):
        scripts.run(read_program("train.py"), "plans:planned")


# --- files ---

SAVES = """
torch.save({"model": model.state_dict(), "numbers": [1]}, "checkpoint.pt")
torch.save(optimizer, "optimizer.pt")
torch.save({"data": torch.ones(3)}, "data.pt")
assert torch.load("data.pt")["data"].tolist() == [1, 1, 1]
for place in ("cuda", {"cuda:0": "cuda:0"}, lambda storage, location: storage.cuda(0)):
    assert torch.load("data.pt", map_location=place)["data"].is_cuda
for place in ("cpu", {"cuda:0": "cpu"}, lambda storage, location: storage):
    assert not torch.load("data.pt", map_location=place)["data"].is_cuda
from safetensors.torch import load_file, save_file
save_file(model.state_dict(), "model.safetensors")
save_file({"data": torch.ones(3)}, "data.safetensors")
assert load_file("data.safetensors")["data"].tolist() == [1, 1, 1]
open("log.txt", "a").write("a line")
"""


def test_no_weights_without_values_are_written_and_nothing_stays_that_was_computed_beside_them(run, here):
    (here / "checkpoint.pt").write_text("an earlier one")
    code, told, errors = run(loop(step=STEP + SAVES))
    assert code == 0, errors
    assert (here / "checkpoint.pt").read_text() == "an earlier one"
    assert {path.name for path in here.iterdir()} == {"checkpoint.pt", "train.py"}
    files = ("torch.save to checkpoint.pt", "torch.save to optimizer.pt", "safetensors' save_file to model.safetensors")
    assert told["notes"] == [f"not written, as its weights have no values: {file}" for file in files]


ROTATES = """
import os, pathlib, pickle, shutil
os.replace("last.pt", "before.pt")
torch.save(model.state_dict(), "last.pt")
shutil.copyfile("last.pt", "best.pt")
os.symlink("last.pt", "linked.pt")
pathlib.Path("other.pth").unlink(missing_ok=True)
assert not os.path.exists("other.pth")
shutil.rmtree("run", ignore_errors=True)
with open("whole.ckpt", "wb") as file: torch.save(model, file)
with open("data.pkl", "wb") as file: pickle.dump([1], file)
torch.save({"epoch": number}, "state.pt")
assert torch.load("state.pt") == {"epoch": number}
torch.save(optimizer, "new.pt.part")
os.rename("new.pt.part", "new.pt")
for name in ("best.pt", "linked.pt", "new.pt"): assert os.path.exists(name) and pathlib.Path(name).stat()
assert torch.load("last.pt")["0.weight"].is_cuda and (number or torch.load("before.pt") == "before last.pt")
os.remove("new.pt")
assert not os.path.exists("new.pt")
pathlib.Path("log.txt").write_text("a line")
os.replace("log.txt", "log.old")
assert open("log.old").read() == "a line" and not os.path.exists("log.txt")
"""


def test_no_checkpoint_from_before_is_lost_and_what_is_not_written_is_there_for_the_script(run, here):
    (here / "run").mkdir()
    files = [
        "last.pt",
        "before.pt",
        "best.pt",
        "other.pth",
        "whole.ckpt",
        "state.pt",
        "run/model.safetensors",
        "log.old",
    ]
    for name in files:
        torch.save(f"before {name}", here / name)
        os.utime(here / name, (0, 0))
    before = [(here / name).read_bytes() for name in files]
    code, told, errors = run(loop(step=STEP + ROTATES))
    assert code == 0, errors
    assert {path.name for path in here.iterdir()} == {"train.py", "run", *files} - {"run/model.safetensors"}
    assert [(here / name).read_bytes() for name in files] == before
    left = [note for note in told["notes"] if note.startswith("left as it is, a file from before: ")]
    names = ["last.pt", "other.pth", "run", "whole.ckpt", "state.pt", "log.old"]
    assert [note.rpartition(" ")[2] for note in left] == names


WRITES_ELSEWHERE = """
import io, multiprocessing, os, shutil, subprocess, tempfile
memory = io.BytesIO()
torch.save([number], memory)
assert memory.getvalue()
assert subprocess.run(["cat"], input=b"told", capture_output=True).stdout == b"told"
read, write = os.pipe()
with os.fdopen(write, "wb") as file: file.write(b"piped")
with os.fdopen(read, "rb") as file: assert file.read() == b"piped"
with tempfile.TemporaryDirectory() as folder: shutil.copy("train.py", os.path.join(folder, "old.pt"))
assert not os.path.exists(folder)
"""


def test_pipes_memory_and_temporary_files_are_written_beside_old_checkpoints(run, here):
    torch.save(1, here / "old.pt")
    os.utime(here / "old.pt", (0, 0))
    code, told, errors = run(loop(step=STEP + WRITES_ELSEWHERE))
    assert code == 0 and not told["notes"], errors
    assert {path.name for path in here.iterdir()} == {"train.py", "old.pt"}


WRITES_OVER = """
import numpy, os, pickle, shutil, tempfile
with open("words.pkl", "wb") as file: pickle.dump(["word"] * 500, file)
with open("words.pkl", "rb") as file: assert len(pickle.load(file)) == 500
assert os.path.getsize("words.pkl") > 500
numpy.savez("weights.npz", *[weight.detach().cpu().numpy() for weight in model.parameters()])
assert len(numpy.load("weights.npz").files) == 16
with open("again.pt", "r+b") as file:
    assert number or file.read() == b"again.pt"
    file.seek(0)
    file.truncate()
    torch.save(model.state_dict(), file)
if os.path.exists("run"): shutil.rmtree("run")
os.makedirs("run")
try: open("run/best.pt")
except FileNotFoundError: pass
else: raise AssertionError
with open("run/best.pt", "wb") as file: torch.save(model.state_dict(), file)
assert torch.load("run/best.pt")["0.weight"].is_cuda
with open(file="best", mode="wb") as file: torch.save(model.state_dict(), file)
shutil.copyfile(src="best", dst="run/copy.pt")
os.remove(path="run/copy.pt")
assert "copy.pt" not in os.listdir(path="run")
with tempfile.NamedTemporaryFile(dir="run", delete=False) as file: torch.save(model.state_dict(), file)
os.replace(file.name, "run/last.pt")
assert torch.load("run/last.pt") and torch.load("again.pt")
torch.jit.script(model).save("model.ts")
"""


def test_of_many_files_in_a_folder_one_is_named(run, here):
    (here / "rows").mkdir()
    for name in [*(f"rows/{number}.txt" for number in range(40)), "best.txt"]:
        (here / name).write_text("before")
        os.utime(here / name, (0, 0))
    again = "for n in range(40): open(f'rows/{n}.txt', 'w').write('now')\nopen('best.txt', 'w').write('now')\n"
    code, told, errors = run(loop(build=again + BUILD))
    left = [note for note in told["notes"] if note.startswith("left as it is, a file from before: ")]
    assert code == 0 and (here / "rows/39.txt").read_text() == "before", errors
    assert [note.partition(": ")[2] for note in left] == ["rows/0.txt, and 39 others in rows", "best.txt"]


def test_what_a_script_writes_over_a_file_from_before_it_reads_again_and_the_file_stays(run, here):
    (here / "run").mkdir()
    names = "words.pkl", "weights.npz", "run/best.pt", "again.pt", "best", "run/last.pt"
    for name in names:
        (here / name).write_text(name)
        os.utime(here / name, (0, 0))
    code, told, errors = run(loop(step=STEP + WRITES_OVER))
    assert code == 0, errors
    assert [(here / name).read_text() for name in names] == [*names] and not (here / "model.ts").exists()
    assert len([*(here / "run").iterdir()]) == 2
    assert "left as it is, a file from before: words.pkl" in told["notes"]
    assert "not written, as its weights have no values: torch.save to best" in told["notes"]
    assert "not written, as its weights have no values: torch.jit.save to model.ts" in told["notes"]


WRITES_WHAT_IT_KNOWS = """
import json, logging, os, pathlib, shutil
loss = model(torch.randn(8, 1024, device="cuda")).mean().item()
json.dump({"loss": loss}, open("best.json", "w"))
assert json.load(open("best.json"))["loss"] == loss
pathlib.Path("part.json").write_text("{}")
os.replace("part.json", "state.json")
assert pathlib.Path("state.json").read_text() == "{}" and not os.path.exists("part.json")
logging.FileHandler("log.txt").stream.write("a line")
with open("log.txt", "a") as log: log.write("another")
if not number: assert open("log.txt").read().startswith("log.txt")
shutil.copy("train.py", "copy.py")
shutil.copy2("log.txt", "best.txt")
known = open("log.txt").read()
with open("log.txt", "a") as log: log.write("more")
assert open("best.txt").read() == known
if not number:
    os.rename("old.txt", "older.txt")
    assert open("older.txt").read() == "old.txt" and os.stat("older.txt").st_size == 7
    open("older.txt", "a").write("er")
    assert open("older.txt").read() == "old.txter" and not os.path.exists("old.txt")
    open("old.txt", "x").write("new")
    os.remove("gone.txt")
assert open("old.txt").read() == "new" and "gone.txt" not in os.listdir()
open("mine.txt", "w").write("mine")
"""


def test_no_text_from_before_is_overwritten_by_numbers_that_nobody_knows(run, here):
    names = "best.json", "state.json", "log.txt", "copy.py", "old.txt", "gone.txt"
    for name in names:
        (here / name).write_text(name)
        os.utime(here / name, (0, 0))
    code, told, errors = run(loop(step=STEP + WRITES_WHAT_IT_KNOWS))
    assert code == 0, errors
    assert [(here / name).read_text() for name in names] == [*names]
    assert {path.name for path in here.iterdir()} == {*names, "train.py"}
    assert {note.rpartition(" ")[2] for note in told["notes"]} == {*names}


MOVES = """
import numpy, os, shutil
if number == 0:
    os.unlink("latest")
    os.symlink("new.txt", "latest")
    shutil.move("runs", "runs_old")
    os.makedirs("runs")
    assert os.listdir("runs") == [] and os.listdir("runs_old/exp") == ["args.txt"]
    assert open("runs_old/exp/args.txt").read() == "runs/exp/args.txt" and not os.path.exists("runs/exp/args.txt")
    assert [names for *_, names in os.walk("runs_old")] == [[], ["args.txt"]]
    open("runs_old/exp/more.txt", "w").write("more")
    os.remove("runs_old/exp/args.txt")
    assert os.listdir("runs_old/exp") == ["more.txt"] and open("runs_old/exp/more.txt").read() == "more"
    for name in os.listdir("ckpts"): os.remove(os.path.join("ckpts", name))
    os.rmdir("ckpts")
    assert not os.path.exists("ckpts")
    shutil.rmtree("done")
    os.makedirs("done")
    open("done/new.txt", "w").write("new")
    shutil.move("done", "kept")
    assert os.listdir("kept") == ["new.txt"] and not os.path.exists("done")
    open("link", "w").write("written")
    assert open("behind.txt").read() == "written"
    numpy.savetxt("numbers.txt", numpy.ones(3))
    assert numpy.loadtxt("numbers.txt").sum() == 3
"""


TOKENIZES = """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
made = Tokenizer(models.WordLevel({"new": 0, "[UNK]": 1}, "[UNK]"))
for folder in ("old", "new"):
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)
"""


def test_a_tokenizer_from_before_is_not_overwritten(run, here):
    (here / "old").mkdir()
    (here / "old/tokenizer.json").write_text("old")
    code, told, errors = run(loop(BUILD + TOKENIZES))
    assert code == 0 and "left as it is, a file from before: old/tokenizer.json" in told["notes"], errors
    assert (here / "old/tokenizer.json").read_text() == "old" and "new" in (here / "new/tokenizer.json").read_text()


COPIES_SETTINGS = """
import shutil
os.makedirs("made", exist_ok=True)
open("made/results.txt", "a").write("mine\\n")
shutil.copy2("settings.txt", "made/settings.txt")
assert open("made/results.txt").read().startswith("mine") and os.path.exists("made/settings.txt")
torch.save(model.state_dict(), "weights.pt")
"""


def test_what_a_script_copies_from_before_is_its_own(run, here):
    (here / "settings.txt").write_text("old")
    os.utime(here / "settings.txt", (0, 0))
    code, told, errors = run(loop(f"import os\n{BUILD}", STEP + COPIES_SETTINGS))
    assert code == 0 and not any("from before" in note for note in told["notes"]), errors
    assert {path.name for path in here.iterdir()} == {"train.py", "settings.txt"}


def test_numpy_refuses_what_has_a_gradient_as_pytorch_does(run):
    code, _, errors = run(loop(step="model(torch.randn(8, 1024).cuda()).cpu().numpy()\n" + STEP))
    assert code == 1 and "Can't call numpy() on Tensor that requires grad" in errors


def test_folders_and_links_from_before_stay_where_they_are(run, here):
    names = "runs/exp/args.txt", "ckpts/1.txt", "done/old.txt", "behind.txt", "numbers.txt"
    for name in names:
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_text(name)
        os.utime(here / name, (0, 0))
    for link, name in (("latest", "behind.txt"), ("link", "behind.txt")):
        (here / link).symlink_to(name)
        os.utime(here / link, (0, 0), follow_symlinks=False)
    code, told, errors = run(loop(step=STEP + MOVES))
    assert code == 0, errors
    assert [(here / name).read_text() for name in names] == [*names]
    assert os.readlink(here / "latest") == os.readlink(here / "link") == "behind.txt"
    left = {note.rpartition(" ")[2] for note in told["notes"]}
    assert left == {"runs", "ckpts/1.txt", "ckpts", "done", "behind.txt", "numbers.txt", "latest"}


KEEPS_THE_LAST_TWO = """
import glob, os, pathlib
torch.save(model.state_dict(), f"run/step_{9 - number % 10}.pt")
found = sorted(glob.glob("run/*.pt"))
assert found == sorted(map(str, pathlib.Path("run").glob("*.pt"))) and "left.txt" in os.listdir("run")
assert found == sorted(os.path.join("run", name) for name in os.listdir("run") if name.endswith(".pt"))
with os.scandir("run") as entries:
    assert {entry.path for entry in entries if entry.is_file() and entry.stat()} >= {*found, "run/left.txt"}
for old in found[2:]: os.remove(old)
if os.path.exists("run/last"): os.rename("run/last", "run/older")
"""


def test_a_script_that_keeps_its_last_checkpoints_finds_those_that_it_saved_and_none_that_it_deleted(run, here):
    (here / "run").mkdir()
    names = [f"run/{name}" for name in ("zero_1.pt", "zero_2.pt", "left.txt", "last")]
    for name in names:
        (here / name).write_text(name)
    torch.save(1, here / "run/last")
    before = [(here / name).read_bytes() for name in names]
    for name in names:
        os.utime(here / name, (0, 0))
    code, told, errors = run(loop(step=STEP + KEEPS_THE_LAST_TWO))
    assert code == 0, errors
    assert [(here / name).read_bytes() for name in names] == before and len([*(here / "run").iterdir()]) == 4
    assert "left as it is, a file from before: run/zero_2.pt" in told["notes"]


COPIES = """
import filecmp, glob, os, shutil, tarfile, tempfile, zipfile
from pathlib import Path
def is_there(name): return torch.load(name)["0.weight"].shape == (1024, 1024)
Path("old.pt").touch()
os.chmod("old.pt", 0o600)
os.makedirs("last", exist_ok=True)
torch.save(model.state_dict(), "last/weights.pt")
Path("last/config.json").write_text("{}")
os.symlink("weights.pt", "last/newest.pt")
shutil.copytree("last", "best", dirs_exist_ok=True)
shutil.copytree("last", "links", dirs_exist_ok=True, symlinks=True)
assert is_there("best/weights.pt") and is_there("links/newest.pt") and Path("best/config.json").read_text() == "{}"
assert os.path.islink("links/newest.pt") and not os.path.islink("best/newest.pt")
os.utime("best/weights.pt")
Path("best/weights.pt").touch()
shutil.copystat("best/weights.pt", "best/config.json")
shutil.copymode("best/config.json", "best/weights.pt")
shutil.move(shutil.copy2("best/weights.pt", "moved.pt"), "best")
shutil.move("best", f"best{number}")
assert is_there(f"best{number}/moved.pt") and not os.path.exists("best")
if os.path.islink("latest"): os.unlink("latest")
os.symlink(f"best{number}", "latest")
assert os.readlink("latest") == f"best{number}" == os.path.basename(os.path.realpath("latest"))
assert is_there("latest/moved.pt") and sorted(os.listdir("latest")) == sorted(os.listdir(f"best{number}"))
assert Path("latest/config.json").read_text() == "{}" and "latest/moved.pt" in glob.glob("**/*.pt", recursive=True)
one, other = "latest/weights.pt", "last/weights.pt"
assert Path(one).resolve(strict=True).stat() and os.access(one, os.R_OK)
assert len(Path(one).read_bytes()) == os.path.getsize(one) >= sum(each.nbytes for each in model.parameters())
assert not os.path.samefile(one, other) and filecmp.cmp(one, other, shallow=False)
assert os.path.getmtime(one) <= os.path.getmtime(other) + 60 and os.lstat(one).st_mtime_ns
with tarfile.open("all.tar", "w") as archive: archive.add(one)
with zipfile.ZipFile("all.zip", "w") as archive: archive.write(one)
with tempfile.NamedTemporaryFile(dir=".", delete=False) as file: torch.save(model.state_dict(), file)
os.replace(file.name, "whole.pt")
with open("opened.pt", "wb") as file: torch.save(model.state_dict(), file)
assert is_there("whole.pt") and is_there("opened.pt")
assert shutil.disk_usage(".") and os.statvfs(".") and torch.hub.get_dir()
os.remove("old.pt")
torch.save(model.state_dict(), "old.pt")
"""


def test_weights_that_are_not_written_are_copied_moved_linked_and_looked_at_as_if_they_were(run, here):
    (here / "old.pt").write_text("an earlier one")
    os.utime(here / "old.pt", (0, 0))
    code, _, errors = run(loop(step=STEP + COPIES))
    assert code == 0, errors
    assert {path.name for path in here.iterdir()} == {"train.py", "old.pt"}
    assert (here / "old.pt").read_text() == "an earlier one" and (here / "old.pt").stat().st_mtime == 0


def write_hole(path, shapes, kind="F32", size=4):
    """A file of safetensors that is as long as the weights, and has none: it is a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = size * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end := end + nbytes]}
    header = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


LOADS = "from safetensors.torch import load_file\nmodel.load_state_dict(load_file('model.safetensors'))\noptimizer ="


def test_weights_are_known_by_the_header_of_their_file(run, here):
    shapes = {f"{number}.{name}": [1024] * n for number in range(8) for name, n in (("weight", 2), ("bias", 1))}
    write_hole(here / "model.safetensors", shapes)
    code, told, errors = run(PLAIN.replace("optimizer =", LOADS))
    assert code == 0 and told["owners"]["weights"] == 8 * 4 * 1024 * 1025, errors


CONVERTS = """
import resource
from safetensors.torch import load_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weight = load_file("model.safetensors")["weight"].to("cpu", torch.float32)[:1024]
assert weight.shape == (1024, 1024) and weight.dtype == torch.float32
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**16  # KiB
model[0].weight = torch.nn.Parameter(weight.cuda())
optimizer ="""


def test_weights_of_another_format_are_converted_without_values(run, here, expected):
    """As from_pretrained does with a checkpoint in 16 bits."""
    write_hole(here / "model.safetensors", {"weight": [2**16, 1024]}, "BF16", 2)
    code, told, errors = run(PLAIN.replace("optimizer =", CONVERTS))
    assert code == 0 and told["owners"]["weights"] == 8 * 4 * 1024 * 1025, errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01)


# --- a process of its own ---


@pytest.mark.usefixtures("here")
def test_a_process_of_its_own_gives_what_the_function_gives(here, expected, capfd):
    Path("train.py").write_text("print('printed')\n" + PLAIN)
    predicted = predict("train.py --unused", "T4")
    assert predicted.allocated == pytest.approx(expected[0], rel=0.01) and predicted.verdict() == "fits"
    assert capfd.readouterr() == ("", "")


ASKS_ITS_TERMINAL = """
import os
lines, columns = os.popen("stty size").read().split()
assert os.get_terminal_size() == (int(columns), int(lines)) == (80, 24)
import getpass
for ask in (input, getpass.getpass, input):
    try: ask()
    except EOFError: pass
    else: raise AssertionError
"""


@pytest.mark.usefixtures("here")
@pytest.mark.skipif(os.name != "posix", reason="no terminals")
def test_a_script_that_asks_its_terminal_for_a_width_gets_one_and_its_input_is_at_its_end(expected):
    Path("train.py").write_text(ASKS_ITS_TERMINAL + PLAIN)
    assert predict("train.py", "T4").allocated == pytest.approx(expected[0], rel=0.01)


@pytest.mark.usefixtures("here")
def test_a_script_that_takes_long_is_said_to_be_where_it_is(here, monkeypatch, capfd):
    monkeypatch.setattr(scripts, "_PATIENCE", 1.0)
    slow = loop("import time" + BUILD, STEP + "if number == 0:\n    for _ in range(40): time.sleep(0.1)\n", steps=2)
    (here / "train.py").write_text(slow)
    with pytest.raises(RuntimeError, match="ended after 2 steps, and 3 are needed"):
        predict("train.py", "T4")
    assert re.search(r"^effgpu: train.py has run for \d+ s: 1 step, now in train.py:\d+$", capfd.readouterr().err, re.M)


def test_who_tells_where_a_script_is_keeps_nothing_of_it_alive(here, monkeypatch):
    class Held: ...

    class Marks:
        asked, doing, slowed = 0, "", ""

        @property
        def count(self):
            self.asked += 1
            if self.asked > 4:
                raise SystemExit
            return 2

    def hold():
        held = Held()
        while not (here / child.WHERE).exists():
            exec("time.sleep(0.01)")  # in no file, as what Python writes for a dataclass
        return weakref.ref(held)

    def tell():
        with contextlib.suppress(SystemExit):
            child._watch(here / child.WHERE, Marks(), [], None)

    monkeypatch.setattr(child, "TOLD_EVERY", 0.5)
    threading.Thread(target=tell, daemon=True).start()
    assert hold()() is None
    assert re.fullmatch(r": 2 steps, now in test_attaching.py:\d+", (here / child.WHERE).read_text())


@pytest.mark.usefixtures("here")
def test_an_interrupt_ends_the_script_which_leaves_nothing_that_it_computed(here):
    computes = "import os, time, torch\nweight = torch.ones(2, 2, device='cuda')\nweight @ weight\ntime.sleep(0.05)\n"
    writes = "open('loss', 'w').write('1.0')\nopen('pid', 'w').write(str(os.getpid()))\n"
    Path("train.py").write_text(f"{computes}{writes}time.sleep(600)")
    command = [sys.executable, "-m", "effgpu", "predict", "--", "python", "train.py"]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    deadline = time.monotonic() + 60
    while not (here / "pid").exists() or not (number := (here / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and "Traceback" not in process.stderr.read()
    assert not psutil.pid_exists(int(number)) and {path.name for path in here.iterdir()} == {"train.py"}


def test_a_script_that_makes_no_step_shows_what_it_printed(run):
    """It may have caught its own error."""
    code, told, errors = run("try: import no_such_module\nexcept ImportError as why: print('failed:', why)")
    assert code == 2 and "failed: No module named 'no_such_module'" in errors
    assert list(told) == ["failed"] and errors.splitlines()[-1].endswith(told["failed"])


def test_a_loader_with_a_timeout_for_its_workers_is_walked(run):
    code, told, errors = run("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(TensorDataset(torch.ones(64, 8)), 8, num_workers=1, timeout=30)
        for rows, in loader:
            assert (loader.timeout, loader.num_workers) == (30, 1)
            model(rows.cuda()).sum().backward()
            optimizer.step()
    """)
    assert code == 0 and told["allocated"], errors


WAITS_FOR_BATCHES = """
import queue, threading, torch
model = torch.nn.Linear(8, 8).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = queue.Queue()
def fetch():
    open("failing", "w")  # before the first batch, so it stays
    batches.put(torch.randn(4, 8))
    batches.put(None + 1)
threading.Thread(target=fetch).start()
for _ in range(3):
    model(batches.get().to("cuda")).sum().backward()
    optimizer.step()
"""


def test_a_script_that_waits_for_a_thread_that_has_failed_is_ended(here):
    (here / "train.py").write_text(WAITS_FOR_BATCHES)
    (here / "temporary").mkdir()
    command = [sys.executable, "-m", "effgpu", "predict", "--gpu", "T4", "--", "python", "train.py"]
    environment = os.environ | {"TMPDIR": str(here / "temporary")}
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    assert time.time() - (here / "failing").stat().st_mtime < 9, "nobody else can give it a batch"
    *_, last = ended.stderr.splitlines()
    said = "train.py failed after step 1: a thread of the script failed: TypeError: unsupported operand"
    assert ended.returncode == 1 and said in last and last.endswith("(train.py:9)")
    assert not [*(here / "temporary").iterdir()]
    assert not [each for each in psutil.process_iter(["environ"]) if environment["TMPDIR"] in str(each.info)]


TEMPORARY = """
import os, tempfile
here = {"dir": "temporary"}
folder, file = tempfile.TemporaryDirectory(**here), tempfile.NamedTemporaryFile(**here)
open(os.path.join(folder.name, "data"), "w").write("unpacked")
"""


def test_what_python_would_remove_at_a_scripts_end_is_removed(run, here):
    (here / "temporary").mkdir()
    code, _, errors = run(TEMPORARY + PLAIN)
    assert code == 0 and not [*(here / "temporary").iterdir()], errors


def test_a_script_that_trains_on_is_predicted_though_a_thread_has_failed(run):
    code, _, errors = run("import threading\nthreading.Thread(target=lambda: 1 / 0).start()\n" + PLAIN)
    assert code == 0, errors


@pytest.mark.parametrize(
    "wait", ["threading.Event().wait(4)", "threading.Timer(4, event.set).start(); event.wait()"], ids=["time", "thread"]
)
def test_a_script_that_waits_for_something_else_is_predicted_though_a_thread_has_failed(wait, run):
    begin = "import threading\nevent = threading.Event()\nthreading.Thread(target=lambda: 1 / 0).start()\n"
    code, _, errors = run(f"{begin}{wait}\n{PLAIN}")
    assert code == 0, errors


# --- marks and plans ---


def counting(most):
    yield from most
    return "the end"


def test_a_plan_pulls_a_function_and_is_pushed_by_a_script():
    calls, ends = [], []
    assert drive(counting([1, 0, 2]), lambda: calls.append(1)) == "the end" and len(calls) == 3
    marks = Marks(ends.append)
    optimizer, other = (torch.optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
    with marks.pushing(lambda: counting([1, 2])):
        for _ in range(4):
            assert not ends
            optimizer.step()
            other.step()
    optimizer.step()
    assert ends == ["the end"] and marks.count == 4 and marks.source is optimizer


def test_a_step_that_runs_out_of_data_is_no_end_of_the_plan():
    with pytest.raises(StopIteration):
        drive(counting([5]), partial(next, iter([None] * 3)))


def test_steps_that_a_scaler_skips_and_empty_ones_are_marks():
    marks, weight = Marks(print), torch.zeros(1, requires_grad=True)
    with marks.pushing(lambda: counting([100])):
        optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
        for value in (math.inf, 1.0, math.inf):
            scaler.scale(weight * value).sum().backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.step = lambda: None
        optimizer.step()
    assert marks.count == 4 and torch.optim.Optimizer.__setattr__ is object.__setattr__


def test_a_step_that_calls_its_parents_is_one_also_where_the_parent_has_hooks_of_its_own():
    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    marks, weight = Marks(print), torch.zeros(1, requires_grad=True)
    with marks.pushing(lambda: counting([100])):
        torch.optim.SGD([weight])  # PyTorch gives a class its hooks when one of it is made
        optimizer = Noted([weight])
        for _ in range(3):
            weight.sum().backward()
            optimizer.step()
    assert marks.count == 3 and marks.source is optimizer


# --- transformers and accelerate ---

TRAINER = """
import torch
from transformers import AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
assert arguments.device.type == "cuda" and arguments.n_gpu == 1
model = AutoModelForSequenceClassification.from_pretrained("bert")
rows = [{"input_ids": [0] * 128, "label": 0}] * 640
model.save_pretrained("saved")
Trainer(model, arguments, train_dataset=rows).train()
"""
ACCELERATED = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification
accelerator = Accelerator(gradient_accumulation_steps=2)
model = AutoModelForSequenceClassification.from_pretrained("bert").train()
rows = torch.utils.data.TensorDataset(torch.zeros(640, 128, dtype=torch.long), torch.zeros(640, dtype=torch.long))
loader = torch.utils.data.DataLoader(rows, 16)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for ids, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=ids, labels=labels).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def bert(here):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_hidden_layers=2)
    BertForSequenceClassification(config).save_pretrained(here / "bert")

    def variant(batch, as_trainer):
        model = BertForSequenceClassification(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=as_trainer)
        scaler = torch.amp.GradScaler("cuda")

        def step():
            for _ in range(32 // batch):
                ids, labels = torch.zeros(batch, 128, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
                with torch.autocast("cuda", torch.float16):
                    loss = model(input_ids=ids, labels=labels).loss
                scaler.scale(loss).backward()
            if as_trainer:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    return variant


@pytest.mark.slow
def test_a_trainer_and_accelerate_do_as_on_the_gpu(bert, here, capfd):
    """fp16=True is left out where PyTorch says that there is no GPU."""
    trainer = "python train.py --output_dir out --fp16 --per_device_train_batch_size 32 --report_to none"
    launcher = "accelerate launch --mixed_precision fp16 train.py"
    for script, command, batch, as_trainer in ((TRAINER, trainer, 32, True), (ACCELERATED, launcher, 16, False)):
        (here / "train.py").write_text(script)
        assert main(["predict", "--gpu", "T4", "--json", "-", "--", *command.split()]) == 0
        told = json.loads(capfd.readouterr().out)
        alike = predict(partial(bert, batch, as_trainer), "T4")
        assert told["allocated"] == pytest.approx(alike.allocated, rel=0.01)
        assert seconds(told) == pytest.approx(alike.time().expected, rel=0.01)
    assert not list((here / "saved").glob("*.safetensors"))


# --- kinds of step ---

FUNC = """
params = {name: value.detach() for name, value in model.named_parameters()}
loss_of = lambda params, x: torch.func.functional_call(model, params, (x[None],)).square().mean()
gradients = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, torch.randn(64, 1024).to("cuda"))
for name, parameter in model.named_parameters():
    parameter.grad = gradients[name].mean(0)
optimizer.step()
optimizer.zero_grad()
"""
CTC = """
logits = model(torch.randn(50, 8, 1024).to("cuda")).log_softmax(-1)
lengths = torch.full((8,), 50).to("cuda"), torch.full((8,), 20).to("cuda")
torch.nn.functional.ctc_loss(logits, torch.randint(1, 1024, (8, 20)).to("cuda"), *lengths).backward()
optimizer.step()
optimizer.zero_grad()
"""
SPARSE = """
import torch
table = torch.nn.Embedding(50_000, 64, sparse=True).to("cuda")
optimizer = torch.optim.SparseAdam(table.parameters())
"""
LOOKED_UP = """
table(torch.randint(0, 50_000, (256, 20)).to("cuda")).mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
PACKED = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
model = torch.nn.LSTM(256, 256, batch_first=True).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
"""
READ_PACKED = """
texts, lengths = torch.randn(8, 64, 256).to("cuda"), torch.arange(8, 72, 8)
packed = pack_padded_sequence(texts, lengths, batch_first=True, enforce_sorted=False)
pad_packed_sequence(model(packed)[0], batch_first=True)[0].mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
GATHERED = """
import torch.distributed
import torch.distributed.nn
found = [None]
torch.distributed.all_gather_object(found, {"a": 1})
assert found == [{"a": 1}]
embedded = torch.cat(torch.distributed.nn.all_gather(model(torch.randn(64, 1024).to("cuda"))))
embedded.square().mean().backward()
optimizer.step()
optimizer.zero_grad()
"""
HOST_STEP = """
import torch
model = torch.nn.Linear(1024, 1024).to("cuda")
held = [parameter.detach().to("cpu") for parameter in model.parameters()]
optimizer = torch.optim.AdamW(held)
"""
UPDATED = """
model(torch.randn(64, 1024).to("cuda")).mean().backward()
for one, parameter in zip(held, model.parameters()):
    one.grad, parameter.grad = parameter.grad.to("cpu"), None
optimizer.step()
"""


def test_gradients_of_single_samples_are_as_large_as_the_batch(run):
    code, told, errors = run(loop(step=FUNC))
    assert code == 0 and not told["unknown"], errors
    a_sample = 8 * (1024 * 1024 + 1024) * 4
    assert told["allocated"] > 64 * a_sample


def test_the_ctc_loss_keeps_its_paths_by_the_longest_target(run):
    code, told, errors = run(loop(step=CTC))
    assert code == 0 and [why for why in told["unknown"] if "_ctc_loss" in why] == told["unknown"], errors


def test_a_sparse_gradient_takes_what_its_rows_take(run):
    code, told, errors = run(loop(SPARSE, LOOKED_UP))
    assert code == 0, errors
    table = 50_000 * 64 * 4
    assert 3 * table < told["allocated"] < 3 * table + 16 * 256 * 20 * 64 * 4  # the table, and two states of its size


def test_a_packed_sequence_is_as_long_as_its_lengths(run):
    code, told, errors = run(loop(PACKED, READ_PACKED))
    assert code == 0, errors
    code, padded, errors = run(loop(PACKED, READ_PACKED.replace("torch.arange(8, 72, 8)", "torch.full((8,), 64)")))
    assert code == 0 and told["allocated"] < padded["allocated"], errors
    assert not told["assumptions"]


def test_what_a_single_rank_gathers_is_its_own(run, expected):
    start = "\nimport torch.distributed\ntorch.distributed.init_process_group('nccl', world_size=1, rank=0)\n"
    code, told, errors = run(loop(BUILD + start, GATHERED))
    assert code == 0, errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.02)


COLLECTS = """
import torch.distributed as dist
here, copy, one = torch.ones(4, device="cuda"), torch.empty(4, device="cuda"), [None]
works = [
    dist.all_reduce(here, async_op=True),
    dist.all_reduce(here, dist.ReduceOp.AVG, None, True),
    dist.reduce(here, 0, async_op=True),
    dist.broadcast(here, 0, async_op=True),
    dist.barrier(async_op=True),
    dist.all_gather(tensor_list=[copy], tensor=here, async_op=True),
    dist.all_gather_into_tensor(output_tensor=copy, input_tensor=here, async_op=True),
    dist.reduce_scatter_tensor(copy, here, async_op=True),
    dist.reduce_scatter(copy, [here], async_op=True),
    dist.gather(here, [copy], async_op=True),
    dist.scatter(copy, [here], async_op=True),
    dist.all_to_all([copy], [here], async_op=True),
    dist.all_to_all_single(copy, here, async_op=True),
    *dist.batch_isend_irecv([dist.P2POp(dist.isend, here, 0), dist.P2POp(dist.irecv, copy, 0)]),
]
assert all([work.wait() for work in works]) and works[0].is_completed()
assert works[0].get_future().then(lambda future: future.value()).wait()[0] is here and isinstance(works[0], dist.Work)
assert dist.all_reduce(here) is dist.barrier() is dist.all_reduce_coalesced([here]) is None
dist.scatter_object_list(one, [{"a": 1}], src=0)
assert one == [{"a": 1}]
dist.gather_object({"b": 1}, object_gather_list=one)
assert one == [{"b": 1}]
"""


def test_what_a_single_rank_collects_in_the_background_is_done(run):
    start = "\nimport torch.distributed\ntorch.distributed.init_process_group('nccl', world_size=1, rank=0)\n"
    code, _, errors = run(loop(BUILD + start, STEP + COLLECTS))
    assert code == 0, errors


PROFILED = """
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
when = schedule(wait=0, warmup=0, active=1)
with profile(schedule=when, on_trace_ready=tensorboard_trace_handler("traces"), with_stack=True) as profiler:
    STEP
    profiler.step()
profiler.key_averages(group_by_input_shape=True).table(sort_by="cuda_time_total", row_limit=10)
assert not profiler.events() and not profiler.profiler.function_events and not profiler.profiler.self_cpu_time_total
profiler.profiler.total_average()
profiler.export_chrome_trace("trace.json")
profiler.export_stacks("stacks.txt", "self_cuda_time_total")
profiler.add_metadata("a", "b")
profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
profiler.start()
profiler.stop()
torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
with torch.autograd.profiler.profile(use_device="cuda") as older, torch.autograd.profiler.record_function("named"):
    with torch.autograd.profiler.emit_nvtx(), torch.autograd.profiler.emit_itt(), torch.profiler.itt.range("a"):
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("b"))
        torch.ones(4, device="cuda").sum()
print(older, older.key_averages().table(), older.table(), older.total_average())
"""


def test_a_profiler_of_the_scripts_records_nothing(run, here, expected):
    code, told, errors = run(loop(step=PROFILED.replace("STEP", STEP.strip().replace("\n", "\n    "))))
    assert code == 0, errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01)
    assert seconds(told) == pytest.approx(expected[1], rel=0.05)
    assert {path.name for path in here.iterdir()} == {"train.py"}


def test_an_optimizer_of_the_cpus_is_no_kernel_of_the_gpus(run):
    code, told, errors = run(loop(HOST_STEP, UPDATED))
    assert code == 0, errors
    assert told["unknown"] == ["how long the optimizer takes on the CPU, where its weights are"]
    weights = 4 * (1024 * 1024 + 1024)
    assert told["allocated"] < 2.2 * weights and told["gpus"][0]["verdict"] == "fits"
    bus = weights / 16e9  # the gradients alone, at all that a T4's bus could carry
    assert seconds(told) > bus


@pytest.mark.parametrize(
    "step, why",
    [
        (
            "torch.nested.nested_tensor([torch.randn(n, 1024) for n in (3, 5)], layout=torch.jagged, device='cuda')",
            "nested",
        ),
        (
            "from torch.nn.attention.flex_attention import flex_attention\n"
            "x = torch.randn(1, 1, 128, 64, device='cuda')\nflex_attention(x, x, x)",
            "FlexAttention is predicted in compiled code alone, as in torch.compile(flex_attention)",
        ),
    ],
    ids=["nested", "flex"],
)
def test_what_cannot_be_predicted_is_said_in_one_sentence(run, step, why):
    code, _, errors = run(loop(step=step + STEP))
    assert code == 2 and why in errors.splitlines()[-1] and "Traceback" not in errors


ATTENDS = """
q = model(torch.randn(64, 1024).to("cuda")).view(2, 8, 4, 1024).half()
torch.nn.functional.scaled_dot_product_attention(q[..., :64], q[..., :64], q[..., :64]).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""


# A script that leaves a new file each time that it runs.
COUNTED = "import tempfile\ntempfile.mkstemp(prefix='run', dir='.')\n"


def count_runs(folder):
    return len([*folder.glob("run*")])


def forget_runs(folder):
    for path in folder.glob("run*"):
        path.unlink()


@pytest.mark.parametrize("step, runs", [(STEP, 1), (ATTENDS, 2)], ids=["same", "other kernels"])
def test_a_script_runs_once_more_for_older_gpus_where_they_differ(step, runs, run, here, capfd):
    script = COUNTED + loop(step=step)
    alone = run(script)[1]
    forget_runs(here)
    assert main(["predict", "--gpu", "A100 40 GB", "--gpu", "T4", "--json", "-", "--", "python", "train.py"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert count_runs(here) == runs
    assert [gpu["name"] for gpu in told["gpus"]] == ["A100 40 GB", "T4"]
    assert told["gpus"][1]["needed"] == alone["gpus"][0]["needed"]
    assert told["gpus"][1]["time"]["expected"] == pytest.approx(alone["gpus"][0]["time"]["expected"], rel=1e-6)


# A full GPU: 2**19 rows take more than a T4 has, 2**18 fit.


MANY = STEP.replace('torch.randn(64, 1024).to("cuda")', 'torch.randn(rows, 1024, device="cuda")')


def tries(handling, rows=2**19):
    """A script that trains on so many rows, and does this where an error of PyTorch's is raised."""
    body = f"for _ in range(4):\n{textwrap.indent(MANY, '    ')}"
    attempt = f"try:\n{textwrap.indent(body, '    ')}\n    break\nexcept {handling}"
    return f"import sys{BUILD}{COUNTED}rows = {rows}\nwhile rows:\n{textwrap.indent(attempt, '    ')}"


HALVES = tries("torch.cuda.OutOfMemoryError:\n    rows //= 2")
ENDS = tries("RuntimeError as error:\n    sys.exit(f'{error}: out of memory')")


def test_a_script_that_catches_running_out_of_memory_goes_on_with_less(run, here):
    halved = tries("torch.cuda.OutOfMemoryError:\n    rows //= 2", 2**18)
    _, told, errors = run(HALVES)
    forget_runs(here)
    _, alone, _ = run(halved)
    assert told["allocated"] == alone["allocated"] and seconds(told) == pytest.approx(seconds(alone)), errors
    assert told["reserved"]["high"] < 1.3 * alone["reserved"]["high"] and not alone["notes"]
    assert re.fullmatch(
        r"train.py:12 runs out of memory on a T4 \(predicted\), and train.py:9 catches .*: what follows is predicted",
        *told["notes"],
    )


def test_a_script_that_runs_out_of_memory_and_ends_is_predicted_as_if_it_fitted(run, here):
    _, told, _ = run(ENDS)
    assert count_runs(here) == 2, "the second time, as if it fitted"
    forget_runs(here)
    _, alone, _ = run(tries("KeyError:\n    rows = 0"))
    assert count_runs(here) == 1
    assert told["allocated"] == alone["allocated"] > 16 * 2**30 and told["gpus"][0]["verdict"] == "does not fit"
    assert told["notes"][0].endswith("catches that, and ends: predicted as if it fitted") and not alone["notes"]


def test_of_several_gpus_none_is_full(run, here, capfd):
    run(HALVES)
    forget_runs(here)
    assert main(["predict", "--gpu", "T4", "--gpu", "H100", "--json", "-", "--", "python", "train.py"]) == 3
    told = json.loads(capfd.readouterr().out)
    assert told["allocated"] > 16 * 2**30
    assert told["notes"][0].endswith('catches that: predict for "T4" alone to see what follows')


FREE = {
    "mem_get_info": "rows = 4096 * (torch.cuda.mem_get_info()[0] >> 33)",
    "total_memory": "rows = 4096 * (torch.cuda.get_device_properties(0).total_memory >> 33)",
}


@pytest.mark.parametrize("asks", FREE)
def test_a_size_that_follows_from_the_memory_is_that_of_one_gpu(asks, run, here, capfd):
    script = loop(f"{BUILD}{FREE[asks]}", STEP.replace("64, 1024", "rows, 1024"))
    alone = {gpu: run(script, gpu=gpu)[1] for gpu in ("T4", "A100 80 GB")}
    assert alone["T4"]["allocated"] < alone["A100 80 GB"]["allocated"]
    assert not any("sizes that follow" in what for told in alone.values() for what in told["assumptions"])
    main(
        [
            "predict",
            *(word for gpu in (*alone, "A100 40 GB") for word in ("--gpu", gpu)),
            "--json",
            "-",
            "--",
            "python",
            "train.py",
        ]
    )
    told = json.loads(capfd.readouterr().out)
    needed = {gpu["name"]: gpu["needed"] for gpu in told["gpus"]}
    for name, one in alone.items():
        assert needed[name] == one["gpus"][0]["needed"]
    (what,) = told["assumptions"]
    assert what.startswith(
        "sizes that follow from a GPU's memory are those of the A100 80 GB, which train.py:5 asks for"
    )


def test_doctor_follows_a_script_that_catches_running_out_of_memory(run, here, capfd):
    run(HALVES.replace("range(4)", "range(9)"))
    main(["doctor", "--gpu", "T4", "--", "python", "train.py"])
    told, _ = capfd.readouterr()
    assert "catches that: what follows is predicted" in told and "does not fit" not in told


def test_what_lies_on_the_host_takes_no_room_on_the_gpu(run):
    """2**18 rows fit, and so do 2**19, whose activations are kept on the host."""
    kept_there = "with torch.autograd.graph.save_on_cpu(pin_memory=True): loss ="
    _, told, errors = run(HALVES.replace("loss =", kept_there))
    assert told["notes"] == [] and told["gpus"][0]["verdict"] != "does not fit", errors


FETCHES = """
import torch
weight = torch.ones(2**16, 64, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
while True:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = weight.sin().exp().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_fetched_from_the_host_is_on_the_gpu(run):
    """The weight, the copy of it that is fetched, its cosine, and the gradient before and after that."""
    _, told, errors = run(FETCHES)
    assert told["allocated"] // 2**24 == 5, errors


LINEARS = BUILD.replace("1024", "2048").replace(".AdamW(", ".SGD(")
PACKS = """
def pack(saved):
    if len(saved) != 4096: return saved  # weights
    host = SENT
    return saved.device, host
def unpack(packed):
    return packed if torch.is_tensor(packed) else packed[1].to(packed[0], non_blocking=True)
"""


@pytest.mark.parametrize(
    "sent",
    [
        "saved.cpu()",
        'saved.to("cpu", non_blocking=True)',
        'torch.empty_like(saved, device="cpu", pin_memory=True).copy_(saved, non_blocking=True)',
        "torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True).copy_(saved, non_blocking=True)",
    ],
)
def test_what_hooks_of_saved_tensors_send_to_the_cpu_crosses_the_bus_and_back(sent, run):
    """As those of torchtune do, and PyTorch's tutorial. There are eight inputs, and what is squared."""
    step = "rows = torch.randn(4096, 2048, device='cuda')\n" + STEP.replace('torch.randn(64, 1024).to("cuda")', "rows")
    hooks = "with torch.autograd.graph.saved_tensors_hooks(pack, unpack):\n    loss ="
    size = 4 * 4096 * 2048
    _, told, errors = run(loop(LINEARS + PACKS.replace("SENT", sent), step.replace("loss =", hooks)))
    copies = told["gpus"][0]["time"]["kinds"]["copies to the CPU and back"]
    assert (copies["bytes"], copies["kernels"]) == (2 * 9 * size, 2 * 9), errors
    assert told["owners"]["activations"] <= 2 * size


def test_what_is_made_on_the_cpu_like_something_on_the_gpu_crosses_no_bus(run):
    more = "held = [torch.zeros_like(rows, device='cpu') for rows in model.parameters()]\n"
    more += "rows = model[0].weight.new_ones(64, 64, device='cpu')\n"
    plain, told = (run(loop(step=STEP + each))[1] for each in ("", more))
    assert (told["allocated"], seconds(told)) == (plain["allocated"], seconds(plain))


@pytest.mark.parametrize("writes", ["history[number] = loss.detach()", "history[number].copy_(loss.detach().cpu())"])
def test_what_a_tensor_on_the_cpu_gets_of_the_models_is_not_known_there(writes, run):
    build = f"{BUILD}history, counts = torch.zeros(9), torch.zeros(9)\n"
    step = STEP.replace("loss.backward()", f"{writes}\ncounts[number] = 1\nloss.backward()")
    step += "if history[: number + 1].mean() > 0.5: model[0](torch.randn(64, 1024).cuda())\n"
    step += "if counts.sum() > 9: raise SystemExit\nprint(history.mean().item())\n"
    step += "print(max(history.tolist()))\nprint(history.numpy().max())\n"
    _, told, errors = run(loop(build, step))
    assert told["unknown"] == ["train.py:15 decides by a value, taken as False"], errors
    assert {f"train.py:{line} reads an array, taken as zeros" for line in (18, 19)} <= {*told["assumptions"]}


SMI = """
import subprocess, torch
asks = ["nvidia-smi", "--query-gpu=name,memory.total,clocks.sm", "--format=csv,noheader,nounits"]
told = subprocess.run(asks, capture_output=True, text=True, check=True).stdout
assert told == "Tesla T4, 14909, [N/A]\\n", told
total = subprocess.getoutput("nvidia-smi -i 0 --query-gpu=memory.total --format=csv 2>/dev/null | tail -1")
assert total == "14909 MiB", total
assert "Tesla T4" in subprocess.getoutput("nvidia-smi") and b"T4" in subprocess.run("nvidia-smi", stdout=-1).stdout
assert subprocess.getoutput("echo my-nvidia-smi nvidia-smi.log") == "my-nvidia-smi nvidia-smi.log"
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has its own")
def test_nvidia_smi_answers_for_the_gpu_where_there_is_none(run, here):
    code, told, errors = run(SMI + PLAIN)
    assert code == 0 and told, errors
    (here / "nvidia-smi").write_text("#!/bin/sh\necho mine")
    (here / "nvidia-smi").chmod(0o755)
    mine = "import os, subprocess\nos.environ['PATH'] += ':' + os.getcwd()\n"
    code, told, errors = run(f"{mine}assert subprocess.getoutput('nvidia-smi') == 'mine'\n{PLAIN}")
    assert code == 0 and told, errors


ASKS_FOR_MEMORY = """
import torch
kept = torch.zeros(2**20, device="cuda")
torch.zeros(2**20, device="cuda")
assert torch.cuda.memory_allocated(0) == torch.cuda.memory.memory_allocated() == 2**22
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 2**23
free, total = torch.cuda.mem_get_info()
torch.cuda.reset_peak_memory_stats()
assert torch.accelerator.max_memory_allocated() == 2**22 and total > 14 * 2**30
assert torch.cuda.memory.mem_get_info() == (free + 2**22, total)
"""


def test_what_a_script_asks_of_the_gpus_memory_is_what_it_has_there(run):
    code, told, errors = run(ASKS_FOR_MEMORY + PLAIN)
    assert code == 0 and told, errors


# Work that comes only in some steps

LAZY = """
inputs = torch.randn(64, 1024, device="cuda", requires_grad=True)
loss = model(inputs).square().mean()
if number % 16 == 0:
    (gradients,) = torch.autograd.grad(model(inputs.repeat(256, 1)).sum(), inputs, create_graph=True)
    loss = loss + gradients.square().sum()
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""
NOW_AND_THEN = """
import torch

class Orthogonal(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        self.calls = getattr(self, "calls", 0) + 1
        for weight in self.param_groups[0]["params"]:
            self.update(weight)

    def update(self, weight):
        if self.calls % 10 == 0:
            torch.linalg.qr(weight)
        weight.sub_(weight.grad)
"""


def test_a_larger_step_before_the_one_that_counts_is_named_and_counts_for_the_memory(run):
    (_, told, errors), (_, alone, _) = run(loop(step=LAZY)), run(loop(step=LAZY.replace("% 16 == 0", "< 0")))
    (needed, without) = (each["gpus"][0]["needed"] for each in (told, alone))
    assert told["allocated"] == alone["allocated"] + 2**18, "the first step's `gradients`"
    open_end = {"expected": None, "high": None}
    assert told["gpus"][0]["time"] == alone["gpus"][0]["time"] | open_end, errors
    assert needed["low"] > without["low"] + 2**29 and needed["high"] > without["high"] + 2**29
    took = r"before the step that was counted, the script took more, 1\.0\d GiB \(predicted\): train.py:\d+: .*"
    assert re.fullmatch(took, *told["notes"])
    assert not alone["notes"] and not alone["unknown"]
    (why,) = told["unknown"]
    assert why.endswith("one before had 39 matrix products in its backward pass, and 16 in the one that was counted")


def test_what_an_optimizer_does_only_in_some_steps_is_named(run):
    own = loop(
        NOW_AND_THEN + BUILD.replace("torch.optim.AdamW", "Orthogonal"), f"{STEP}if number % 3 == 0: print(loss)"
    )
    _, told, errors = run(own)
    asked = "train.py:12: if self.calls % 10 == 0:"
    assert told["unknown"] == [f"how long an optimizer takes for what it does only in some steps: {asked}"], errors
    _, told, _ = run(own.replace("if self.calls % 10 == 0:", "if self.calls > 10:"))
    assert told["unknown"] == []
    shares = own.replace("for weight in", "for number, weight in enumerate(").replace('s"]:', 's"]):')
    _, told, errors = run(
        shares.replace("self.update(", "if (number + 1) % 1 == 0: self.update(").replace("s % 10", "s")
    )
    assert told["unknown"] == [], errors


# An optimizer that is dropped has only tried something.

DROPPED = {
    "a learning rate": """
def tried():
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for rows in (1, 2):
        model(torch.randn(1024 * rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

tried(), tried()
""",
    "backward passes": """
for rows in (1, 2):
    model(torch.randn(1024 * rows, 1024, device="cuda")).sum().backward()
    model.zero_grad()
""",
}


@pytest.mark.parametrize("kind", DROPPED)
def test_steps_of_an_optimizer_that_is_dropped_are_no_training(kind, run, expected):
    code, told, errors = run(PLAIN.replace("optimizer =", f"{DROPPED[kind]}\noptimizer =", 1))
    assert code == 0 and not told["assumptions"] and not told["unknown"], errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01)
    assert seconds(told) == pytest.approx(expected[1], rel=0.01)


def test_a_batch_that_is_found_by_doubling_is_the_one_that_counts(run):
    probe = f"""
import gc
{BUILD.rpartition("optimizer")[0]}
def fits(rows):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        for _ in range(2):
            model(torch.randn(rows, 1024, device="cuda")).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        gc.collect()
        return False
    return True

rows = 2**14
while fits(rows):
    rows *= 2
rows //= 2
optimizer = torch.optim.AdamW(model.parameters())
"""
    _, told, errors = run(loop(probe, MANY))
    _, alone, _ = run(tries("KeyError:\n    rows = 0", 2**18))
    assert told["allocated"] == pytest.approx(alone["allocated"], rel=0.01), errors
    assert seconds(told) == pytest.approx(seconds(alone), rel=0.01) and len(told["notes"]) == 1


AHEAD = """
import queue, threading
from concurrent.futures import ThreadPoolExecutor

class Ahead(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.batches = queue.Queue(2)
        self.start()

    def run(self):
        while True:
            self.batches.put(torch.randn(512, 1024).to("cuda", non_blocking=True))

    def take(self):
        return self.batches.get()

pool, ahead = ThreadPoolExecutor(), Ahead()
"""
ASKED = "pool.submit(lambda: print(loss.item())).result()"


def test_threads_of_a_script_have_its_gpu_and_read_its_tensors(run):
    """One fetches batches ahead, another one logs, as Keras' does."""
    head = f"{BUILD}{AHEAD}"
    step = "loss = model(ahead.take()).square().mean()\nloss.backward()\noptimizer.step()\noptimizer.zero_grad()"
    _, told, errors = run(loop(head, f"{step}\n{ASKED}"))
    _, plain, _ = run(loop(BUILD, step.replace("ahead.take()", 'torch.randn(512, 1024).to("cuda")')))
    assert told["allocated"] == pytest.approx(plain["allocated"] + 3 * 512 * 1024 * 4, rel=0.05), errors
    assert any("reads a number, taken as 1" in each for each in told["assumptions"]), told["assumptions"]
    assert not any("differ in size" in each for each in told["assumptions"])


FETCHING = """
def fetch():
    batch = None
    for _ in range(9):
        following = torch.randn(4096, 1024).to("cuda").sub_(0.5) * 2
        if batch is not None:
            yield batch
        batch = following

batches = fetch()
"""


def test_a_batch_that_is_fetched_a_step_ahead_makes_no_two_steps_differ(run):
    """As timm's PrefetchLoader does: a step makes one batch, too, and uses the one before."""
    _, told, errors = run(loop(BUILD + FETCHING, STEP.replace('torch.randn(64, 1024).to("cuda")', "next(batches)")))
    assert not any("differ in size" in each for each in told["assumptions"]), errors


def test_a_step_that_trains_few_of_the_weights_says_so(run):
    head = "for layer in model[:-1]: layer.requires_grad_(False)\n"
    few = "model.extend(torch.nn.Linear(1024, 1024).cuda() for _ in range(8))\n"
    build = BUILD.replace("optimizer =", f"{few}{head}optimizer =")
    _, told, errors = run(loop(build))
    assert told["notes"] == ["the step that was counted trains 6.25% of the weights of all modules"], errors
    fewest = "model.requires_grad_(False)\nmodel.append(torch.nn.Linear(1024, 1, False).cuda())\n"
    (note,) = run(loop(BUILD.replace("optimizer =", f"{few}{few}{fewest}optimizer =")))[1]["notes"]
    assert note == "the step that was counted trains less than 0.01% of the weights of all modules"


def test_a_model_of_shapes_alone_has_no_weights_that_a_step_could_train(run):
    """Such as one on "meta" whose weights are counted for a law of scaling, as in nanochat."""
    shapes = "with torch.device('meta'): large = torch.nn.Linear(2**15, 2**15)\n"
    _, told, errors = run(loop(BUILD + shapes))
    assert not told["notes"], errors


def test_a_step_whose_optimizer_trains_copies_on_the_cpu_does_not_say_which_share_it_trains(run):
    copies = """
copies = [p.detach().cpu() for p in model.parameters()]
for copy in copies: copy.grad = torch.zeros_like(copy)
others, optimizer = optimizer, torch.optim.SGD([*copies, model[0].bias], 0.1)
"""
    assert not [note for note in run(loop(BUILD + copies))[1]["notes"] if "trains" in note]


EXPLORES = """
import random
if random.random() < CHANCE:
    chosen = 0
else:
    chosen = model(torch.randn(1, 1024).to("cuda")).argmax().item()
"""


@pytest.mark.parametrize(("chance", "known"), [("2", False), ("-1", True)])
def test_what_chance_sends_to_the_gpu_in_other_steps_is_named(chance, known, run):
    """As of a policy that explores at first."""
    _, told, errors = run(loop(step=EXPLORES.replace("CHANCE", chance) + STEP))
    named = [each for each in told["unknown"] if "where chance decides otherwise: train.py:" in each]
    assert bool(named) != known and (told["gpus"][0]["time"]["expected"] is None) != known, errors
    assert told["gpus"][0]["verdict"] == "fits"


def test_marks_are_counted_anew_where_what_made_them_is_gone():
    marks, weight, made = Marks(print), torch.zeros(1, requires_grad=True), []

    def plan():
        made.append(plan)
        yield 100

    first, beside = torch.optim.SGD([weight]), torch.optim.SGD([weight])
    with marks.pushing(plan):
        first.step(), beside.step(), first.step()
        assert (marks.count, marks.source, len(made)) == (2, first, 1)
        del first
        beside.step()
        assert (marks.count, marks.source, len(made)) == (1, beside, 2)
        beside.itself = beside  # as a scheduler does it
        beside = torch.optim.SGD([weight])
        beside.step(), beside.step()
    assert (marks.count, marks.source, len(made)) == (2, beside, 3)


def test_the_first_step_after_a_trial_of_one_step_is_one():
    marks, weight = Marks(print), torch.zeros(1, requires_grad=True)
    with marks.pushing(lambda: counting([100])):
        for trial in range(2):
            optimizer = torch.optim.SGD([weight])
            torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts a step on the instance
            optimizer.step()
            assert marks.count == 1 and marks.total == trial + 1


# Checks that a guess does not pass, and tests on which nothing depends

CHECKED = {
    "by a name": "fine = bool((loss > 0).all())\nif not fine:\n    raise ValueError('negative')\n",
    "by a function": "fine = bool((loss > 0).all())\ncheck(fine)\n",
    "by what a function returns": "try:\n    assert is_kept(loss) or loss is None\nexcept AssertionError:\n"
    "    torch.empty(2**28, device='cuda')\n",
    "told": "if loss > 9:\n    print('large', loss)\nelse:\n    warnings.warn('small')\n",
}


@pytest.mark.parametrize("kind", CHECKED)
def test_a_check_passes_and_what_is_only_told_changes_nothing(kind, run, expected):
    helper = "import torch, warnings\ndef check(fine):\n    if not fine: raise ValueError('negative')\n"
    helper += "@torch.no_grad()\ndef is_kept(x): return not x.dim() and torch.allclose(x, x.abs())\n"
    code, told, errors = run(loop(helper + BUILD, STEP + CHECKED[kind]))
    assert code == 0 and not told["unknown"] and told["allocated"] == pytest.approx(expected[0], rel=0.01), errors
    assert [each.split(" ", 1)[1] for each in told["assumptions"]] == ["checks a value, taken as passed"] * (
        kind != "told"
    )


def test_where_no_other_guess_helps_the_first_error_is_shown(run, here):
    script = COUNTED + loop(step=STEP + "fine = bool(loss > 0)\nraise KeyError(fine)\n")
    code, _, errors = run(script)
    assert code == 1 and "KeyError: False; not known here: train.py:14 reads a value, taken as False" in errors
    assert count_runs(here) == 3


def test_what_is_expanded_on_the_cpu_is_stored_in_full_on_the_gpu(run, expected):
    """And a part of a larger tensor without the rest."""
    moves = "rows = torch.rand(1, 1024).expand(1024, 1024).to('cuda')\nrows += 1\n"
    part = "part = torch.rand(1024, 4096)[:, ::4].to('cuda')\n"
    code, told, errors = run(PLAIN.replace("optimizer =", f"{moves}{part}optimizer =", 1))
    assert code == 0 and told["allocated"] == pytest.approx(expected[0] + 2 * 2**22, rel=0.005), errors


# Caches, evaluations, copies, rows, experts, folds

GROWS = """
kept = None
with torch.no_grad():
    for _ in range(40):
        made = model(torch.randn(8192, 1024, device="cuda"))
        kept = made if kept is None else torch.cat([kept, made])
del made, kept
"""


EVALUATES = """
model.train(False)
with torch.no_grad():
    for batch in range(3): model(torch.randn(64, 1024, device="cuda"))
model.train()
"""


def test_an_evaluation_in_each_step_is_said_once(run):
    _, told, errors = run(loop(step=STEP + EVALUATES, steps=9))
    note = "an evaluation is part of the step that was counted: the script evaluates in each"
    assert told["notes"] == [note], errors
    before = loop(BUILD + 2 * EVALUATES, STEP + EVALUATES, steps=9)
    notes = run(before)[1]["notes"]
    assert notes[0] == note and notes[1].startswith("forward passes without gradients ran before the step")


def test_a_script_that_ends_while_doctor_awaits_a_step_without_an_evaluation_is_told_that_more_are_needed(here, capfd):
    (here / "train.py").write_text(loop(step=STEP + EVALUATES, steps=6))
    code, errors = main(["doctor", "--gpu", "T4", "--", "python", "train.py"]), capfd.readouterr().err
    assert code == 2 and "ended after 6 steps, and more are needed: give it more of them, or more data" in errors
    assert "such as an evaluation" in errors and "6 are needed" not in errors


SORTED = """
from functools import partial
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, distributed
rows = [torch.randn(1 + number // 32, 1024) for number in range(256)]
class Later(BatchSampler):
    def __init__(self, batch_sampler): self.batch_sampler = batch_sampler
    def __iter__(self): return iter(self.batch_sampler)
class Grouped(BatchSampler):
    def __iter__(self):
        rows = sorted(self.sampler) if self.drop_last else self.sampler
        return iter(BatchSampler(rows, self.batch_size, False))
random = RandomSampler(rows, generator=torch.Generator().manual_seed(27))
shared = partial(distributed.DistributedSampler, rows, 1, 0)
drawn = BatchSampler(random, 1, False)
def pad(rows): return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flatten(0, 1)
loader = DataLoader({order}, 32, collate_fn=pad, {more})
batches = iter(loader)
"""


@pytest.mark.parametrize(
    "order, more, factor",
    {
        "sorted": ("rows", "", 8 / 3),
        "the other way": ("rows[::-1]", "", 1),
        "with workers": ("rows", "num_workers=2", 8 / 3),
        "shuffled": ("rows", "shuffle=True", 1),
        "in groups": ("rows", "batch_sampler=[[*range(n, n + 32)] for n in range(0, 256, 32)]", 8 / 3),
        "given once": ("rows", "batch_sampler=iter([[*range(n, n + 32)] for n in range(0, 256, 32)])", 1),
        "of one length": ("[torch.randn(2, 1024)] * 256", "", 1),
        "drawn for a loader": ("rows", "batch_sampler=drawn", 1),
        "drawn, by accelerate": ("rows", "batch_sampler=Later(drawn)", 1),
        "drawn, by a class of its own": ("rows", "batch_sampler=Grouped(random, 1, False)", 1),
        "drawn, and sorted": ("rows", "batch_sampler=Grouped(random, 32, True)", 8 / 3),
        "drawn for one rank": ("rows", "batch_sampler=BatchSampler(shared(seed=5), 1, False)", 1),
        "for one rank": ("rows", "sampler=shared(shuffle=False)", 8 / 3),
    }.values(),
)
def test_a_later_batch_that_is_larger_is_named(order, more, factor, run):
    build = SORTED.format(order=order, more=more)
    build = build.replace("32, collate_fn", "collate_fn") if "batch_sampler" in more else build
    _, told, errors = run(loop(BUILD + build, STEP.replace("torch.randn(64, 1024)", "next(batches)")))
    why = f"what a step takes of a later batch: the last is {factor:.1f} times as large as the one that was counted"
    assert told["unknown"] == [why] * (factor > 1), errors
    assert told["gpus"][0]["verdict"] == ("may not fit" if factor > 1 else "fits")


CUT_SHORT = """
import itertools
from torch.utils.data import BatchSampler, DataLoader
data = torch.randn(160, 1024)
batches = itertools.chain.from_iterable(itertools.repeat(DataLoader(data, 64)))
"""
OF_ROWS = "DataLoader(data, batch_sampler=BatchSampler(range(160), 64, False))"  # as accelerate makes it


@pytest.mark.parametrize("loader", ["DataLoader(data, 64)", OF_ROWS])
def test_an_epochs_last_batch_with_fewer_samples_is_not_the_step_that_counts(loader, run, expected):
    build = BUILD + CUT_SHORT.replace("DataLoader(data, 64)", loader)
    step = STEP.replace("torch.randn(64, 1024)", "next(batches)")
    code, told, errors = run(loop(build, step))
    assert code == 0 and seconds(told) == pytest.approx(expected[1], rel=0.01), errors
    assert told["allocated"] == pytest.approx(expected[0], rel=0.01)
    assert told["unknown"] == told["assumptions"] == []
    code, told, errors = run(loop(build, step, steps=3))
    assert code == 4 and seconds(told) < 0.99 * expected[1], errors
    assert told["unknown"] == [
        "what a step takes of a later batch: the last is 2.0 times as large as the one that was counted"
    ]


def test_a_script_that_ends_where_a_step_without_an_evaluation_is_waited_for_is_predicted_with_it(run, expected):
    evaluates = f"if number == 2:\n{textwrap.indent(EVALUATES, '    ')}"
    for end in ("", "\nraise SystemExit(0)"):
        code, told, errors = run(loop(BUILD, evaluates + STEP, steps=3) + end)
        assert code == 0 and seconds(told) > 1.05 * expected[1], errors
        assert told["notes"] == ["an evaluation is part of the step that was counted: the script ends after it"]


@pytest.mark.parametrize("size", ["512 + number", "512 - number"], ids=["grows", "shrinks, as a drawn one may"])
def test_batches_that_differ_a_little_are_said_to(size, run):
    other = STEP.replace("torch.randn(64, 1024)", f"torch.randn({size}, 1024)")
    (what,) = run(loop(step=other))[1]["assumptions"]
    assert what.startswith("steps differ in size") and "a later step may be larger still" in what


ENLARGED = """
from torch.utils.data import DataLoader
def enlarge(rows): return torch.nn.functional.interpolate(rows[None, None], scale_factor=16, mode="bicubic").mean()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 640
    def __getitem__(self, place): return LOADED(torch.ones(64, 64)) * torch.ones(1024)
batches = iter(DataLoader(Data(), 64))
"""


@pytest.mark.parametrize(
    ("loaded", "batch", "said"),
    [
        ("torch.mean", "next(batches) * enlarge(torch.ones(64, 64))", True),
        ("enlarge", "next(batches)", False),
        ("torch.mean", "next(batches)[torch.randperm(64)] * (torch.rand(64, 1) > 0.5)", False),
    ],
    ids=["in the loop", "in the loader", "indices and masks"],
)
def test_work_on_the_cpu_in_the_loop_is_told_with_its_line(loaded, batch, said, run):
    build = BUILD + ENLARGED.replace("LOADED", loaded)
    code, told, errors = run(loop(build, STEP.replace("torch.randn(64, 1024)", f"({batch})")))
    notes = [note for note in told["notes"] if note.startswith("beside the step, the script works on the CPU: ")]
    assert code == 0 and len(notes) == said, errors
    assert all(re.search(r"here, per step, at train.py:\d+: def enlarge", note) for note in notes)


@pytest.mark.parametrize(
    ("more", "said"),
    {
        "a line for the log": ("log = model[0].weight[:4].abs() if number % 2 else 0", None),
        "a sample": (
            "sample = model(torch.randn(2000, 1024).cuda()) if number % 2 == 0 else 0",
            "what ran in the step before",
        ),
        "a larger batch": ("STEP", "steps differ in size"),
    }.values(),
)
def test_what_one_of_two_steps_makes_more_is_told_as_what_it_is(more, said, run):
    larger = STEP.replace("torch.randn(64, 1024)", "torch.randn(2000 if number % 2 else 64, 1024)")
    _, told, errors = run(loop(step=larger if more == "STEP" else f"{STEP}{more}\n"))
    found = [each for each in told["assumptions"] if "forward pass" in each]
    assert len(found) == bool(said) and all(each.startswith(said) for each in found), (found, errors)
    assert all(("a later step may be larger still" in each) == (more == "STEP") for each in found)


def test_blocks_that_grow_are_given_back_and_an_evaluation_in_some_steps_is_no_part_of_them(run, expected):
    _, told, errors = run(loop(step=f"{STEP}if number % 2 == 1:\n{textwrap.indent(GROWS, '    ')}", steps=9))
    (gpu,) = told["gpus"]
    assert told["reserved"]["high"] > 15 * 2**30 > 4 * told["allocated"], errors
    assert gpu["verdict"] == "fits" and gpu["needed"]["high"] < 5 * 2**30
    assert seconds(told) == pytest.approx(expected[1], rel=0.05)
    (note,) = told["notes"]
    assert note.startswith("forward passes without gradients ran before the step")


RARELY = """
if number % 10 == 9:
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
"""


@pytest.mark.parametrize(
    "test, named",
    {
        "a pass": ("number % 10 == 9", True),
        "later": ("number > 50", True),
        "at one later": ("number == 50", True),
        "not in the first": ("number != 0", False),
        "either way": ("number % 2 == 2", False),
        "no number of a step": ("losses > 50", False),
        "always": ("number >= 0", False),
        "in the first": ("number == 0", False),
        "in the one that is counted": ("number % 5 == 2", False),
    }.values(),
)
def test_a_backward_pass_of_every_tenth_step_is_named(test, named, run):
    either = "losses = 0" + RARELY.replace("number % 10 == 9", test)
    either += (
        "" if named or test in ("losses > 50", "number % 5 == 2") else "else:\n    loss.backward(retain_graph=True)\n"
    )
    _, told, errors = run(loop(step=STEP.replace("loss.backward()", f"{either}\nloss.backward()")))
    assert [why.partition(": ")[0] for why in told["unknown"]] == [
        "what the backward pass takes that comes only in some steps"
    ] * named, errors
    (gpu,) = told["gpus"]
    assert gpu["verdict"] == ("may not fit" if named else "fits") and gpu["needed"]["low"] > 0.9 * told["allocated"]
    assert (gpu["needed"]["high"] is None) == (gpu["time"]["expected"] is None) == named and gpu["time"]["low"] > 0
    more = "times are those of a step with more work in its backward pass than the one before"
    assert told["assumptions"] == [more] * (test == "number % 5 == 2")


MORE = """
if number % 10 != 9:
    loss.backward()
elif loss.requires_grad:
    loss.backward(retain_graph=True)
    {more}
else:
    loss.backward()
"""


@pytest.mark.parametrize("more", ["loss.backward()", "print(loss)"])
def test_a_step_with_more_backward_passes_than_others_is_named(more, run):
    """As where each tenth step of an optimizer of second order has passes of its own beside those of any step."""
    _, told, errors = run(loop(step=STEP.replace("loss.backward()", MORE.format(more=more))))
    what = "what the backward pass takes that comes only in some steps: train.py:10: if number % 10 != 9:"
    assert told["unknown"] == [what] * (more == "loss.backward()"), errors


TERMS = """
count = count + 1
loss = model(torch.randn(64, 1024).to("cuda")).square().mean()
if {test}:
    {term}
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "test, term, named",
    [
        ("count >= 50", "loss = loss + model(torch.ones(64, 1024).to('cuda')).mean()", True),
        ("number % 16 == 15", "loss += sum(weight.abs().sum() for weight in model.parameters())", True),
        ("count >= 1", "loss = loss + model[0].weight.abs().sum()", False),
        ("count >= 50", "loss = loss / 2", False),
        ("count >= 50", "total += loss.item()", False),
    ],
)
def test_a_term_of_the_loss_that_comes_later_is_named(test, term, named, run):
    """As of a GAN that begins when the rest is trained, or of a penalty in each sixteenth step."""
    _, told, errors = run(loop(f"count = total = 0\n{BUILD}", TERMS.format(test=test, term=term), steps=9))
    said = [f"what the backward pass takes that comes only in some steps: train.py:11: if {test}:"]
    assert told["unknown"] == said * named, errors


LATER = """
if number == 50:
    import copy
    average = copy.deepcopy(model)
    graph = torch.cuda.CUDAGraph()
"""


def test_a_copy_and_a_cuda_graph_that_come_later_are_named(run):
    _, told, errors = run(loop(step=STEP + LATER, steps=60))
    assert not told["unknown"], errors
    assert [what.partition(": train.py:")[0] for what in told["assumptions"]] == [
        "without the copy that is made only in some steps",
        "a step that launches its operations: one that is replayed as a CUDA graph takes less",
    ]


def test_what_cuda_graphs_keep_of_a_module_is_not_known(run, expected):
    captured = "model = torch.cuda.make_graphed_callables(model, (torch.randn(64, 1024, device='cuda'),))\n"
    _, told, errors = run(loop(BUILD + captured))
    assert told["unknown"] == ["how much more the CUDA graphs of make_graphed_callables keep"], errors
    assert seconds(told) == pytest.approx(expected[1], rel=0.01)
    assert told["assumptions"] == [
        "a step that launches its operations: one that is replayed as a CUDA graph takes less: train.py:5: "
        + captured.strip()
    ]


BY_AN_OBJECT = """
self.rounds += 1
self.{counts} += 1
if self.{counts} >= 50:
    self.average = self.average or copy.deepcopy(model)
"""


@pytest.mark.parametrize("counts, named", [("rounds", True), ("losses[0]", False)])
def test_a_step_may_be_counted_by_an_object(counts, named, run):
    step = textwrap.indent(STEP + BY_AN_OBJECT.format(counts=counts), " " * 8)
    training = (
        f"import copy\nclass Training:\n    rounds, losses, average = 0, [0.0], None\n    def step(self):\n{step}"
    )
    _, told, errors = run(loop(f"{BUILD}{training}training = Training()\n", "training.step()", steps=9))
    found = [what.partition(": train.py:")[0] for what in told["assumptions"]]
    assert found == ["without the copy that is made only in some steps"] * named, errors


GROWING = STEP.replace("torch.randn(64, 1024)", "torch.randn(rows, 1024)")


@pytest.mark.parametrize(
    "line, named",
    [
        ("rows = 64 if number < 50 else 256", True),
        ("rows = min(256, 64 * (1 + number // 50))", True),
        ("rows = choose(number)", True),
        ("if number == 50: rows = 256", True),
        ("if number == 50: table = table[::-1]", False),
        ("if number == 50: most = 32; sample = torch.zeros(most, 4)", False),
        ("rate = 0.1 if number < 50 else 0.01", False),
        ("last = min(number + 64, 1024)", False),
        ("if number == 0: rows = 8 * len(model)", False),
        ("first = max(0, number // 50); rounds = range(first, 3)", False),
        ("rows = [number if number else 64 for number in (64,)][0]", False),
    ],
)
def test_a_size_that_the_number_of_a_step_decides_is_named(line, named, run, expected):
    choose = (
        "def choose(number): return 64 if number < 50 else 256\nrows, table = 64, [64]\nview = print\nview(table)\n"
    )
    step = (
        f"{line}\n{GROWING}\nmodel.weights = list(range(64))[number:last]" if "last" in line else f"{line}\n{GROWING}"
    )
    _, told, errors = run(loop(choose + BUILD, step, steps=9))
    assert seconds(told) == pytest.approx(expected[1], rel=0.01), errors
    number = 1 + f"{choose}{BUILD}".count("\n") + 2
    said = f"a size that the step's number decides is that of the step that was counted: train.py:{number}: {line}"
    assert told["assumptions"] == [said] * named, errors


WARMING = f"{BUILD}\nlast = -9\nbar = enumerate(range(9))\nfor part, _ in bar:\n"


@pytest.mark.parametrize("test", ["number % every == 0", "number - last >= every"])
@pytest.mark.parametrize("every, named", [("max(1, min(8, number // 50))", True), ("max(1, len(model) // 4)", False)])
def test_a_number_of_batches_that_the_number_of_a_step_decides_is_named(test, every, named, run):
    """As where accumulation begins with a warm-up."""
    step = STEP.replace("optimizer.step()", f"if {test}:\n    last = number\n    optimizer.step()")
    rounds = f"    number = part + 9 * 0\n    every = {every}\n"
    _, told, errors = run(WARMING + rounds + textwrap.indent(step, "    "))
    line = len(WARMING.splitlines()) + 2
    said = f"a size that the step's number decides is that of the step that was counted: train.py:{line}"
    assert [said in each for each in told["assumptions"]] == [True] * named, (told["assumptions"], errors)


CHANGED = """
for epoch in range(3):
    for _ in range(2):
        place = place + 64
        part = [*range(4096)][place:place + rows], torch.ones(8)[:place], range(place, 64), torch.randint(high, (2,))
        part = torch.full((2,), high)
        {step}
    {line}
"""


@pytest.mark.parametrize(
    "line, named",
    [
        ("rows *= 2", True),
        ("rows = min(512, rows * 2)", True),
        ("if epoch % 2: rows = rows + rows // 2", True),
        ("rows += 8", True),
        ("if epoch % 2: rows = rows + 1", True),
        ("rate *= 0.5", False),
        ("high += 1", False),
        ("rows = len(model) * 8", False),
        ("wide = wide * 2", False),
        ("place = (place + rows) % 1024", False),
    ],
)
@pytest.mark.parametrize("given", ["rows, 1024", "*shape(rows)"])
def test_a_size_that_a_loop_changes_is_named(line, given, named, run):
    build = (
        f"{BUILD}rows, rate, wide, place, high = 64, 0.1, 1, 0, 9\n"
        "def shape(rows, wide=1): return torch.empty(rows, 1024).shape\n"
        "for _ in range(3):\n    wide *= 2\n    torch.zeros(wide)[place:place + 64]\n"
    )
    step = textwrap.indent(STEP.replace("64, 1024", given), " " * 8).strip()
    _, told, errors = run(build + CHANGED.format(step=step, line=line))
    said = f"a size that the step's number decides is that of the step that was counted: train.py:20: {line}"
    assert (said in told["assumptions"]) == named, errors


@pytest.mark.parametrize("counts", ["number", "table"])
def test_a_name_of_a_functions_own_is_no_number_of_a_step(counts, run):
    choose = f"def choose({counts}):\n    rows = 64\n    if {counts} != 64: rows = 2 * {counts}\n    return rows\n"
    _, told, errors = run(loop(f"{choose}table = 0\n{BUILD}", f"rows = choose(64)\n{GROWING}\ntable += 1", steps=9))
    assert not told["assumptions"], errors


@pytest.mark.parametrize(
    "how, named",
    [
        ("for weight in model[0].parameters(): weight.requires_grad = True", True),
        ("model[0].requires_grad_()", True),
        ("model[0].requires_grad_(False)", False),
        ("model[0].requires_grad_(requires_grad=False)", False),
    ],
)
def test_weights_that_are_trained_in_later_steps_alone_are_named(how, named, run):
    frozen = "for weight in model[0].parameters(): weight.requires_grad = False\n"
    _, told, errors = run(loop(BUILD + frozen, f"{STEP}\nif number == 50:\n    {how}", steps=9))
    said = ["what a step takes once more weights are trained: train.py:14: if number == 50:"]
    assert told["unknown"] == said * named, errors


def test_gradients_that_are_dropped_for_another_pass_are_not_waited_for(run):
    """As in a GAN whose second loss trains a part of the first one's weights."""
    build = f"{BUILD}other = torch.optim.AdamW(model.parameters())\n"
    part = "other.zero_grad()\nmodel[:4](torch.randn(64, 1024).to('cuda')).mean().backward()\nother.step()\n"
    code, told, errors = run(loop(build, STEP + "model(torch.randn(64, 1024).to('cuda')).mean().backward()\n" + part))
    assert code == 0 and not told["unknown"], errors


@pytest.mark.parametrize("when, named", [("number < 50", True), ("number == 0", False)])
def test_weights_whose_gradients_are_dropped_before_the_update_are_named(when, named, run):
    drops = f"if {when}: model[0].weight.grad = None\n"
    by_hand = "for weight in model.parameters(): weight.grad = None\n"
    step = STEP.replace("loss.backward()\n", f"{by_hand}loss.backward()\n{drops}")
    _, told, errors = run(loop(step=step, steps=9))
    said = [f"what a step takes once more weights are trained: train.py:11: {drops.strip()}"]
    assert told["unknown"] == said * named, errors


STOPS = """
loss = model(torch.randn(64, 1024).to("cuda")).square().mean()
loss.backward()
if loss < best: best, worse = loss.item(), 0
else: worse += 1
if worse > limit: break
optimizer.step()
optimizer.zero_grad()
"""


@pytest.mark.parametrize("limit", [0, 1])
def test_a_guess_that_ends_the_training_early_is_taken_the_other_way_round(limit, run, expected):
    """The first loss is below infinity, whatever it is."""
    code, told, errors = run(loop(f"{BUILD}best, worse, limit = float('inf'), 0, {limit}", STOPS, steps=9))
    assert code == 0 and seconds(told) == pytest.approx(expected[1], rel=0.05), errors
    ended = loop(f"{BUILD}best, worse, limit = float('inf'), 0, {limit}", STOPS, steps=2)
    assert run(ended)[0] == 2


def test_a_loss_is_below_infinity(run):
    asks = "assert loss < float('inf') and not loss > float('inf') and loss > -float('inf') and not loss <= -torch.inf"
    code, told, errors = run(loop(step=STEP.replace("loss.backward()", f"if not ({asks[7:]}): break\nloss.backward()")))
    assert code == 0 and not told["unknown"], errors


def test_a_guess_by_which_no_step_is_ever_made_is_taken_the_other_way_round(run, expected):
    skips = STEP.replace("loss.backward()", "if loss.item() > 0.5: continue\nloss.backward()")
    code, told, errors = run(loop(step=skips))
    assert code == 0 and seconds(told) == pytest.approx(expected[1], rel=0.05), errors
    code, _, errors = run(loop(step=skips.replace("> 0.5", "!= 2")))
    assert code == 2 and "not known here: " in errors and "reads a value, taken as 1.0" in errors


def test_passes_before_an_optimizer_is_made_are_no_training(run, expected):
    probes = "for rows in range(1, 8):\n    model(torch.randn(64 * rows, 1024, device='cuda')).sum().backward()\n    "
    code, told, errors = run(PLAIN.replace("optimizer =", f"{probes}model.zero_grad()\noptimizer =", 1))
    assert code == 0 and told["notes"] == [] and seconds(told) == pytest.approx(expected[1], rel=0.01), errors


OFFLOADS = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4))).to("cuda")
host = [torch.zeros(weight.shape, pin_memory=True) for weight in model.parameters()]
for weight in host: weight.grad = torch.empty_like(weight, pin_memory=True)
optimizer = torch.optim.AdamW(host)
"""
STEPS_ON_THE_HOST = """
model(torch.randn(8, 4096).cuda()).square().mean().backward()
for weight, other in zip(model.parameters(), host):
    other.grad.copy_(weight.grad, non_blocking=True)
    weight.grad = None
optimizer.step()
for weight, other in zip(model.parameters(), host):
    weight.data.copy_(other, non_blocking=True)
"""


def test_what_moves_to_the_cpu_and_back_crosses_the_bus(run):
    _, told, errors = run(loop(OFFLOADS, STEPS_ON_THE_HOST))
    copies = told["gpus"][0]["time"]["kinds"]["copies to the CPU and back"]
    assert copies["bytes"] == 2 * 4 * 4 * 4096**2 and copies["kernels"] == 8, errors
    assert told["unknown"] == ["how long the optimizer takes on the CPU, where its weights are"]


@pytest.mark.parametrize(
    ("sends", "size", "converts"),
    [
        ('rows.to("cpu", torch.float64)', 4, 0),
        ('rows.to("cpu", torch.float64, non_blocking=True)', 8, 1),
        ("wide.copy_(rows)", 4, 0),
        ("wide.copy_(rows, non_blocking=True)", 8, 0),
    ],
)
def test_the_cpu_converts_what_it_waits_for_and_the_gpu_what_it_does_not(sends, size, converts, run):
    build = BUILD + "wide = torch.zeros(1024, 1024, dtype=torch.float64, pin_memory=True)\n"
    plain, sent = (
        run(loop(build, STEP + f"\nrows = model[0].weight.detach()\n{more}")) for more in ("", f"sent = {sends}")
    )
    kinds = sent[1]["gpus"][0]["time"]["kinds"]
    assert kinds["copies to the CPU and back"]["bytes"] == size * 1024**2, sent[2]
    before = plain[1]["gpus"][0]["time"]["kinds"]["other operations"]["kernels"]
    assert kinds["other operations"]["kernels"] == before + converts


ORDERED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
net = torch.nn.Conv2d(3, 8, 3).to("cuda", memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(96, 3, 64, 64)), 8, pin_memory=True):
    net(SENT).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "sent",
    [
        'x.to("cuda", non_blocking=True, memory_format=torch.channels_last)',
        'x.to("cuda", memory_format=torch.channels_last)',
        "x.cuda(non_blocking=True, memory_format=torch.channels_last)",
    ],
)
def test_a_pinned_batch_gets_its_order_on_the_gpu(sent):
    Path("train.py").write_text(ORDERED.replace("SENT", sent))
    events = doctor("train.py", gpu="T4").timeline.events
    ((at, copied),) = ((place, event) for place, event in enumerate(events) if event.kind == COPY)
    assert copied.pinned and copied.waits == ("non_blocking" not in sent)
    reads_and_writes = 2 * 4 * 8 * 3 * 64**2
    assert reads_and_writes in [kernel.bytes for event in events[at + 1 : at + 4] for kernel in event.kernels]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_fused_optimizer_finds_a_scalers_numbers_on_the_gpu(optimizer, run):
    """And a learning rate that is a tensor there: they go to the device of the weights, which PyTorch asks in C++."""
    made = f"{optimizer}(model.parameters(), lr=torch.tensor(0.1, device='cuda'), fused=True)"
    build = BUILD.replace("AdamW(model.parameters())", made) + "scaler = torch.amp.GradScaler()\n"
    step = STEP.replace("loss.backward()", "scaler.scale(loss).backward()")
    step = step.replace("optimizer.step()", "scaler.step(optimizer)\nscaler.update()")
    code, told, errors = run(loop(build, step))
    assert code == 0 and not told["assumptions"], errors
    kinds = told["gpus"][0]["time"]["kinds"]
    assert kinds["optimizer"]["kernels"] > 0 and "copies to the CPU and back" not in kinds


def test_rows_of_a_large_table_take_no_longer_than_those_of_a_small_one(run):
    build = "import torch\ntable = torch.nn.Embedding(ROWS, 64, sparse=True).cuda()\n"
    build += "optimizer = torch.optim.SGD(table.parameters(), 0.1)\n"
    step = "rows = torch.randint(0, 1000, (1024,)).cuda()\n(table(rows).sum() + table(rows).mean()).backward()\n"
    small, large = (
        run(loop(build.replace("ROWS", rows), step + "optimizer.step()")) for rows in ("10_000", "10_000_000")
    )
    assert seconds(small[1]) == seconds(large[1]) < 0.001, large[2]


def test_a_tensor_of_the_cpus_that_grows_stays_there(run):
    own = "mask = model[0].weight.data.new().resize_((1024, 1)).bernoulli_(0.5)\nassert mask.device.type == 'cpu'\n"
    code, _, errors = run(loop(BUILD.replace('.to("cuda")', "") + own, STEP.replace('.to("cuda")', "")))
    assert code == 2 and "trains on the CPU" in errors


EXPERTS = """
_, chosen = torch.topk(model(torch.randn(1024, 1024, device="cuda"))[:, :8], 2, dim=-1)
mask = torch.nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
assert torch.where(mask[3])[0].shape == (256,) and (chosen == 3).nonzero().shape == (256, 2)
assert torch.where((chosen == 3).any(-1))[0].shape == (256,)
"""


def test_one_of_eight_experts_gets_an_eighth(run):
    code, told, errors = run(loop(step=EXPERTS + STEP))
    assert code == 0 and len(told["assumptions"]) == 2, errors
    assert told["assumptions"][0].endswith("takes 12.5% of what it chooses from by value (taken=0.125)")


def test_experts_get_rows_of_counted_sizes_and_a_size_that_nobody_knows_is_refused(run):
    route = 'rows = torch.randn(1024, 1024, device="cuda")\nexpert = model(rows)[:, :8].argmax(1)\n'
    cut = "parts = rows[expert.argsort()].split(torch.bincount(expert, minlength=8).tolist())\n"
    code, told, errors = run(loop(step=route + cut + "assert len(parts[7]) == 128\n" + STEP))
    assert code == 0 and "train.py:9 reads a count, taken as 128" in told["assumptions"], errors
    assert not told["unknown"]
    code, _, errors = run(loop(step=route + "rows.view(expert.max().item(), 7, 1024)\n" + STEP))
    assert code == 2 and "fails without values: RuntimeError: shape '[1, 7, 1024]' is invalid" in errors
    assert "reads a whole number, taken as 1: no size may depend on it" in errors


WORKERS = """
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Rows(IterableDataset):
    def __iter__(self):
        mine = get_worker_info()
        for place in range(mine.id, 640, mine.num_workers): yield torch.full((1024,), place + self.shift)
def prepare(number): get_worker_info().dataset.shift = 1.0
rows = iter(DataLoader(Rows(), 64, num_workers=2, worker_init_fn=prepare))
"""


def test_a_loader_is_what_its_first_worker_is(run):
    step = STEP.replace("torch.randn(64, 1024)", "next(rows)") + "assert get_worker_info() is None\n"
    code, told, errors = run(loop(BUILD + WORKERS, step))
    assert code == 0 and told["assumptions"][0].startswith("a DataLoader's workers do not run"), errors


def test_a_script_that_ends_early_by_a_guess_says_so(run):
    code, _, errors = run(loop(BUILD + "best = 1e9", STEP + "if loss.item() >= best: break\nbest = loss.item()\n"))
    assert code == 2 and "and 3 are needed: give it more of them, or more data; not known here: train.py:" in errors


def test_what_trains_in_a_thread_is_predicted_as_in_the_main_one(run):
    _, told, errors = run(
        f"def train():\n{textwrap.indent(PLAIN, '    ')}\nimport threading\n"
        "one = threading.Thread(target=train)\none.start()\none.join()"
    )
    _, plain, _ = run(PLAIN)
    assert (told["allocated"], seconds(told)) == (plain["allocated"], seconds(plain)), errors


def test_shards_are_refused_by_name(run):
    shards = "from torch.distributed.fsdp import fully_shard\nfully_shard(model)\noptimizer ="
    code, _, errors = run(PLAIN.replace("optimizer =", shards))
    assert code == 2 and "fully_shard cannot be predicted: leave it out, for one rank" in errors


FUNCTIONAL = """
from torch.func import functional_call, grad
loss_of = lambda weights, rows: functional_call(model, weights, (rows,)).square().mean()
found = grad(loss_of)(dict(model.named_parameters()), torch.randn(64, 1024).to("cuda"))
for name, weight in model.named_parameters(): weight.grad = found[name].detach()
optimizer.step()
"""


@pytest.mark.usefixtures("here")
def test_doctor_looks_at_a_step_of_torch_func():
    Path("train.py").write_text(loop(step=FUNCTIONAL, steps=20))
    assert doctor("train.py", gpu="T4").findings


BY_HAND = """
import effgpu, torch
from torch.func import functional_call, grad
model = torch.nn.Linear(1024, 1024).to("cuda")
loss_of = lambda weights, rows: functional_call(model, weights, (rows,)).square().mean()
weights = {name: weight.detach() for name, weight in model.named_parameters()}
for number in range(60):
    for piece in torch.randn(2, 64, 1024).to("cuda"):
        found = grad(loss_of)(weights, piece)
        weights = {name: weight - 0.1 * found[name] for name, weight in weights.items()}
    TICK
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("tick", "products"), [("effgpu.tick()", 2), ("", 1)])
def test_ticks_end_the_steps_of_a_script_that_trains_by_torch_func_alone(tick, products):
    Path("train.py").write_text(BY_HAND.replace("TICK", tick))
    events = doctor("train.py", gpu="T4").timeline.events
    assert sum(kernel.name == "addmm" for event in events for kernel in event.kernels) == products


STATE_ON_CPU = """
class Momentum(torch.optim.Optimizer):
    def __init__(self, weights): super().__init__(weights, {})
    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state: state["mean"] = torch.zeros(weight.shape, pin_memory=True)
            mean = state["mean"].to("cuda", non_blocking=True)
            weight.sub_(mean.lerp_(weight.grad, 0.1))
            state["mean"].copy_(mean, non_blocking=True)
optimizer = Momentum(model.parameters())
"""


@pytest.mark.usefixtures("here")
def test_what_an_optimizer_fetches_from_the_cpu_is_a_part_of_its_step_and_no_batch():
    step = STEP.replace('.to("cuda")', "").replace("(64, 1024", "(64, 1024, device='cuda'")
    Path("train.py").write_text(loop(BUILD + STATE_ON_CPU, step, 12))
    events = doctor("train.py", gpu="T4").timeline.events
    updates = [kernel for event in events if event.optimizing for kernel in event.kernels]
    assert sum(each.bytes == 4 * 1024**2 for each in updates if each.kind == OVER_BUS) == 2 * 8
    assert not any(event.kind == COPY for event in events), "no batch"


MASKED_ON_GPU = """
import torch
table, layer = torch.nn.Embedding(1000, 256).to("cuda"), torch.nn.Linear(256, 1000).to("cuda")
optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], 0.1)
for number in range(20):
    texts = torch.randint(1, 1000, (64, 32))
    texts[:, 24 - number % 2:] = 0
    x = texts.to("cuda")
    labels, mask = torch.full_like(texts, -100).to("cuda"), (texts != 0).long().to("cuda")
    masked = (torch.rand(x.shape, device="cuda") < 0.16) & (x != 0)
    loss = torch.nn.functional.cross_entropy(layer(table(x.masked_fill(masked, 999)))[masked], x[masked])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("here")
def test_texts_that_are_masked_on_the_gpu_have_their_padding_and_a_share_of_what_is_none():
    Path("train.py").write_text(MASKED_ON_GPU)
    found = doctor("train.py", gpu="T4")
    (padding,) = (one for one in found.examined if one.name == "padding")
    shares = (
        "12% of what it chooses from by value (taken=0.12)",
        "11.5% of what it chooses from by value (taken=0.115)",
    )
    assert 25 <= int(padding.note.removesuffix("% of the tokens are padding")) <= 28
    assert sum(note.endswith(shares) for note in found.notes) == 1, "of the step that was counted"


def test_folds_of_two_steps_each_say_so(run):
    fold = "for fold in range(5):\n" + textwrap.indent(loop(steps=2), "    ")
    code, _, errors = run(fold)
    assert code == 2 and "ended after 10 steps, at most 2 with one optimizer, and 3 are needed" in errors


# --- what a GPU refuses ---

DEVICES = {
    "a table": ("table = torch.randn(64, 1024)", "x = x + table"),
    "a mask": ("", "x = x * torch.ones(1, 1024)"),
    "labels": ("", "x = model(x).square() - torch.zeros(64, 1024)"),
    "a teacher": ("teacher = torch.nn.Linear(1024, 1024)", "x = x + teacher(x).detach()"),
    "a list": ("", "x = torch.cat([x, torch.ones(1, 1024)])[:64]"),
    "a place": ("", "x = x.index_select(0, torch.arange(64))"),
    "the CPU's by the GPU's": ("table = torch.randn(64, 1024)", "table[torch.arange(64, device='cuda')]"),
    "a sum": ("total = torch.tensor(0.0)", "total += x.mean().detach()"),
    "a sum of a number": ("table = torch.randn(64, 1024)", "table * x.mean()"),
    "an array": ("", "x.numpy()"),
    "an array of NumPy's": ("import numpy", "numpy.asarray(x)"),
}
MIXED = {
    "indices": ("", "x = x[torch.arange(64)]"),
    "a number": ("scale = torch.tensor(2.0)", "x = x * scale"),
    "a copy": ("table = torch.randn(64, 1024)", "x.copy_(table); table.copy_(x)"),
    "written by indices": ("", "x[torch.arange(8)] = 0.0"),
    "an array": ("", "x.cpu().numpy(); x.numpy(force=True)"),
    "what follows another": ("", "x = x * torch.ones(1, 1024).type_as(x) + torch.ones(1).to(x)"),
    "a list of places": ("table = torch.zeros(100)", "table[[1, 2]] = x[0, :2].cpu()"),
    "a sparse batch": ("", "torch.sparse.mm(torch.eye(64).to_sparse().to('cuda'), x)"),
    "a number of another type": ("", "x[x > 0] = torch.tensor(1.0, dtype=torch.float64)"),
    "what autocast widens": (
        "layer = torch.nn.Bilinear(1024, 1024, 1).cuda()",
        "with torch.autocast('cuda', torch.float16): assert layer(model(x), x).dtype is torch.float32",
    ),
    "a list of losses": ("", "assert not torch.tensor([x.mean(), x.sum()]).mean().is_cuda"),
    "classes": ("", "torch.nn.functional.one_hot(x.argmax(1).cpu(), 1024).sum(0)"),
    "like another": ("", "(x * x.new_tensor([1.0] * 1024) * x.new([1.0] * 1024)).sum(); assert x.new(2, 3).is_cuda"),
    "a sum on the CPU": ("total = torch.tensor(0.0)", "total += x.mean().item(); total += x.mean().cpu()"),
    "the CPU's work": ("table = torch.randn(64, 1024)", "(table + 1).to('cuda') + x"),
    "weights that travel": ("table = torch.nn.Parameter(torch.randn(64, 1024))", "x = x + table.to('cuda')"),
    "lengths": (
        "layer = torch.nn.LSTM(1024, 8).cuda()\nfrom torch.nn.utils.rnn import pack_padded_sequence as pack",
        "layer(pack(x[:, None].expand(64, 4, 1024), torch.full((4,), 64)))",
    ),
    "labels of characters": (
        "",
        "torch.nn.functional.ctc_loss(x[:, None].log_softmax(-1), torch.ones(1, 8).long(), [64], [8])",
    ),
}
FORMATS = {
    "a layer": ("half = torch.nn.Linear(1024, 1024).cuda().half()", "half(x)"),
    "its input": ("wide = torch.nn.Linear(1024, 1024).cuda()", "wide(x.half())"),
    "a product": ("weight = torch.randn(1024, 1024, device='cuda').half()", "x @ weight"),
    "a product with a vector": ("weight = torch.randn(1024, device='cuda').bfloat16()", "x @ weight"),
    "what is written": ("", "x[torch.arange(8, device='cuda')] = torch.ones(8, 1024, device='cuda').half()"),
    "labels": ("", "torch.nn.functional.cross_entropy(x, torch.ones(64, device='cuda').int())"),
}


def refused(build, step, run):
    x = 'x = torch.randn(64, 1024, device="cuda")\n'
    script = loop(f"{BUILD}\n{build}", x + step + STEP.replace('torch.randn(64, 1024).to("cuda")', "x"))
    return run(script)


@pytest.mark.parametrize("build, step", DEVICES.values(), ids=DEVICES)
def test_tensors_of_the_cpu_and_of_the_gpu_are_refused_as_a_gpu_does(build, step, run):
    code, told, errors = refused(build, step, run)
    assert (code, list(told)) == (1, ["failed"])
    words = "Expected all tensors to be on the same device|indices should be either on|can't convert cuda:0 device type"
    assert re.search(words, errors.splitlines()[-1]), errors


@pytest.mark.parametrize("build, step", MIXED.values(), ids=MIXED)
def test_what_a_gpu_takes_of_the_cpu_is_taken(build, step, run):
    code, told, errors = refused(build, step, run)
    assert code == 0 and told["gpus"][0]["verdict"] == "fits", errors


@pytest.mark.parametrize("build, step", FORMATS.values(), ids=FORMATS)
def test_numbers_of_several_formats_are_refused_as_pytorch_does(build, step, run):
    real = {"torch": torch, "x": torch.randn(64, 1024)}
    with pytest.raises(RuntimeError):
        exec(f"{build}\n{step}".replace(".cuda()", "").replace(", device='cuda'", ""), real)
    code, _, errors = refused(build, step, run)
    assert code == 1 and "RuntimeError" in errors.splitlines()[-1] and "dtype" in errors.splitlines()[-1], errors


OF_A_CLASS = """
import torch
class Field(torch.Tensor):
    def new_empty(self, *sizes, **options):
        return type(self)(self.as_subclass(torch.Tensor).new_empty(*sizes, **options))
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten()).cuda()
optimizer = torch.optim.Adam(model.parameters())
while True:
    rows = torch.rand(2, 1, 8, 8).as_subclass(Field).cuda()
    with torch.no_grad(): print(rows.min().item())
    (model(rows).sum() + rows.amin()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_librarys_tensors_with_methods_of_their_own_are_predicted_as_plain_ones(run):
    _, told, errors = run(OF_A_CLASS)
    _, plain, _ = run(OF_A_CLASS.replace(".as_subclass(Field)", ""))
    assert told["allocated"] == plain["allocated"], errors
    assert told["gpus"][0]["time"]["kinds"] == plain["gpus"][0]["time"]["kinds"]


TWO_IN_TURN = """
import torch
model, kept = torch.nn.Linear(1000, 1000).cuda(), []
optimizer = torch.optim.AdamW(model.parameters())
for number in range(100):
    x = torch.randn(500, 1000).cuda()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = [x] if number % 2 == REST else []
    del x
"""


@pytest.mark.parametrize(
    "script", [TWO_IN_TURN.replace("REST", "0"), TWO_IN_TURN.replace("REST", "1")], ids=["even", "odd"]
)
def test_memory_that_comes_and_goes_does_not_grow(script, run):
    assert run(script)[1]["warnings"] == []
    (warning,) = run(re.sub("kept = .* else .*", "kept.append(x)", script))[1]["warnings"]
    assert "grows" in warning


ON_THE_CPU = """
import torch
table, model = torch.nn.Embedding(100_000, 256), torch.nn.Linear(256, 256).cuda()
optimizers = [torch.optim.SGD(table.parameters(), 0.1), torch.optim.AdamW(model.parameters())]
while True:
    model(table(torch.randint(100_000, (64,))).cuda()).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_gradient_of_what_was_made_on_the_cpu_goes_back_there(run):
    _, told, errors = run(ON_THE_CPU)
    assert told["allocated"] < 100_000 * 256 * 4 / 20, errors
    assert told["unknown"] == ["how long the optimizer takes on the CPU, where its weights are"]
    assert told["gpus"][0]["time"]["kinds"]["copies to the CPU and back"]["kernels"] == 2


def test_a_script_with_a_sparse_format_that_is_not_followed_is_told_so(run):
    code, _, errors = run(loop(BUILD + "torch.eye(8).to_sparse_csr().cuda()"))
    assert code == 2 and "a sparse tensor of the format CSR cannot be predicted" in errors.splitlines()[-1]


SAVES_AND_LOADS = {
    "safetensors": "save_file(model.state_dict(), file); loaded = load_file(file)",
    "memory": "memory = io.BytesIO(); torch.save(model.state_dict(), memory)\n"
    "memory.seek(0); loaded = torch.load(memory, map_location='cpu')",
    "memory, then a file": "memory = io.BytesIO(); torch.save(model.state_dict(), memory)\n"
    "open(file, 'wb').write(memory.getvalue()); loaded = torch.load(file, map_location='cpu')",
    "Lightning": "_atomic_save(model.state_dict(), file); loaded = torch.load(file, map_location='cpu')",
}
SAVES_PROGRAMS = """
import io, os
scripted, traced = torch.jit.script(model), torch.jit.trace(model, torch.ones(2, 1024, device="cuda"))
for program in (scripted, traced):
    torch.jit.save(program, "program.ts")
    assert torch.jit.load("program.ts") is program and os.path.getsize("program.ts") >= 8 * 4 * 1024 * 1025
torch.jit.save(scripted, memory := io.BytesIO())
memory.seek(0)
assert torch.jit.load(memory) is scripted
real = torch.jit.script(torch.nn.ReLU())
real.save("real.ts")
assert torch.jit.load("real.ts")(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]
"""
EXPORTS = """
exported = torch.export.export(model, (torch.ones(2, 1024, device="cuda"),))
torch.export.save(exported, "program.pt2")
assert torch.export.load("program.pt2") is exported
torch.onnx.export(model, (torch.ones(2, 1024, device="cuda"),)).save("program.onnx")
torch.onnx.export(model, (torch.ones(2, 1024, device="cuda"),), "program.onnx", dynamo=False)
"""
UNWRITTEN = "not written, as its weights have no values: torch."


def test_programs_with_weights_without_values_are_not_written_and_loaded_as_they_are(run, here):
    torch.jit.script(torch.nn.Linear(2, 2)).save(here / "real.ts")
    os.utime(here / "real.ts", (0, 0))
    before = (here / "real.ts").read_bytes()
    code, told, errors = run(loop(step=STEP + SAVES_PROGRAMS))
    assert code == 0, errors
    assert {path.name for path in here.iterdir()} == {"train.py", "real.ts"}
    assert (here / "real.ts").read_bytes() == before
    unwritten = [f"{UNWRITTEN}jit.save {where}" for where in ("to program.ts", "into memory")]
    assert told["notes"] == [*unwritten, "left as it is, a file from before: real.ts"]


@pytest.mark.slow
def test_programs_that_are_exported_are_not_written(run, here):
    code, told, errors = run(loop(step=STEP + EXPORTS))
    assert code == 0, errors
    assert {path.name for path in here.iterdir()} == {"train.py"}
    assert told["notes"] == [f"{UNWRITTEN}export.save to program.pt2", f"{UNWRITTEN}onnx.export to program.onnx"]


SAVES_SHARDS = """
import os
import torch.distributed.checkpoint as checkpoint
for folder in ("new", "old"):
    checkpoint.save({"model": model.state_dict(), "step": number}, checkpoint_id=folder)
    assert os.path.exists(f"{folder}/.metadata")
    loaded = {"model": model.state_dict(), "step": -1}
    checkpoint.load(loaded, checkpoint_id=folder)
    assert loaded["step"] == number
"""


def test_a_checkpoint_in_shards_is_loaded_again_and_one_from_before_stays(run, here):
    from torch.distributed import checkpoint

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    checkpoint.save({"model": model.state_dict(), "step": 7}, checkpoint_id=here / "old")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    resume = """
import torch.distributed.checkpoint as checkpoint
state = {"model": model.state_dict(), "step": 0}
checkpoint.load(state, checkpoint_id="old")
assert state["step"] == 7
"""
    time.sleep(0.05)
    code, _, errors = run(loop(BUILD + resume, STEP + SAVES_SHARDS))
    assert code == 0, errors
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and path.name != "train.py"} == before


HOLDS = """
torch.save(model.state_dict(), "model.pt")
before = torch.cuda.memory_allocated()
loaded = torch.load("model.pt")
assert torch.cuda.memory_allocated() == before + 8 * 4 * 1024 * 1024 + 8 * 4096
del loaded
assert torch.cuda.memory_allocated() == before
"""


def test_what_is_loaded_and_dropped_is_gone(run):
    assert run(loop(step=STEP + HOLDS))[0] == 0


def test_what_other_programs_write_is_named(run, here):
    (here / "old.txt").write_text("old")
    (here / "kept.txt").write_text("kept")
    calls = 'os.system("echo x >> old.txt; echo x > new.txt")\nopen("mine.txt", "w")\n'
    code, told, errors = run(loop("import os" + BUILD, STEP + calls))
    assert code == 0, errors
    names = sorted(note.rpartition(" ")[2] for note in told["notes"])
    assert names == ["new.txt", "old.txt"]
    assert all(note.startswith("changed by another program, or by code that is not foll") for note in told["notes"])
    assert (here / "old.txt").read_text().startswith("old") and not (here / "mine.txt").exists()


LIGHTNING = """
import io, torch
def _atomic_save(checkpoint, filepath):
    memory = io.BytesIO()
    torch.save(checkpoint, memory)
    open(filepath, "wb").write(memory.getvalue())
"""


LAZY_LOADING = """
import io, pickle, torch
class Unpickler(pickle.Unpickler):
    def persistent_load(self, pid):
        read = self.reader.get_storage_from_record(f"data/{pid[2]}", pid[4] * 4, torch.UntypedStorage)._typed_storage()
        return torch.storage.TypedStorage(wrap_storage=read._untyped_storage, dtype=torch.float32, _internal=True)
def read(filename):
    reader = torch.PyTorchFileReader(str(filename))
    unpickler = Unpickler(io.BytesIO(reader.get_record("data.pkl")))
    unpickler.reader = reader
    return unpickler.load()
class Later:
    def __init__(self, load): self.load = load
    def __getattr__(self, name): return getattr(self.load(), name)
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*(each.load() if isinstance(each, cls) else each for each in args), **(kwargs or {}))
def _lazy_load(filename):
    return {name: Later(lambda name=name: read(filename)[name]) for name in read(filename)}
"""


def test_weights_that_lightning_loads_where_they_are_used_are_loaded(run, here):
    Path("lightning_fabric/utilities").mkdir(parents=True)
    Path("lightning_fabric/utilities/load.py").write_text(LAZY_LOADING)
    torch.save(torch.nn.Linear(8, 8).state_dict(), "weights.pth")
    loads = "layer = torch.nn.Linear(8, 8).cuda()\nlayer.load_state_dict(_lazy_load('weights.pth'))\n"
    script = loop(f"from lightning_fabric.utilities.load import _lazy_load\n{BUILD}{loads}")
    code, told, errors = run(script)
    assert code == 0 and told, errors


@pytest.mark.parametrize("way", SAVES_AND_LOADS.values(), ids=SAVES_AND_LOADS)
def test_what_a_script_has_saved_it_can_load_and_no_folder_without_weights_is_left(way, run, here):
    Path("lightning_fabric/utilities").mkdir(parents=True)
    Path("lightning_fabric/utilities/cloud_io.py").write_text(LIGHTNING)
    before = sorted(map(str, here.rglob("*")))
    imports = "import io, os\nfrom safetensors.torch import load_file, save_file\n"
    imports += "from lightning_fabric.utilities.cloud_io import _atomic_save\n"
    made = "os.makedirs('saved/first'); file = 'saved/first/model'; open('saved/first/config', 'w').write('x')\n"
    _, told, errors = run(loop(f"{imports}{BUILD}{made}{way}\nmodel.load_state_dict(loaded)"))
    assert told["allocated"] == pytest.approx(run(PLAIN)[1]["allocated"], rel=0.01), errors
    left = [each for each in sorted(map(str, here.rglob("*"))) if "__pycache__" not in each and "train.py" not in each]
    assert left == before or "memory" in way
    assert any("not written, as its weights have no values" in note for note in told["notes"])
