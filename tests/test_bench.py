"""`effgpu bench` with real processes. Most scripts sleep instead of training, so that they start at once."""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

import pynvml
import pytest

import effgpu
from effgpu import results
from effgpu.__main__ import main
from effgpu.benching import bench as commands
from effgpu.benching import processes, ticking
from effgpu.benching.bench import Bench
from effgpu.measuring import power, timing
from effgpu.measuring.measurement import Measurement

ROOT = Path(__file__).parent.parent
LOOP = """
import sys, time
import effgpu
{before}
for step in range(1, {steps} + 1):
    {inside}
    effgpu.tick({tick})
"""
MARK = "EFFGPU_TEST"


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path, tmp_path_factory):
    """All processes of a test carry a mark, and none of them outlives it. All files are in pytest's folders."""
    own = uuid.uuid4().hex
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setenv(MARK, own)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield own
    wait_until(lambda: processes._find_processes(own) == [], "a process was left behind")


def wait_until(holds, otherwise, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@pytest.fixture
def script(tmp_path):
    """A function that writes a script and returns the command that runs it."""

    def write(inside="time.sleep(0.002)", tick="", *, before="", steps=10**9, name=None, whole=None):
        path = Path(f"{name or uuid.uuid4().hex[:6]}.py")
        path.write_text(whole or LOOP.format(inside=inside, tick=tick, before=textwrap.dedent(before), steps=steps))
        return f"{sys.executable} {path}"

    return write


@pytest.fixture
def bench(tmp_path):
    """`effgpu.bench`, short, with the commands' output in the test's folder."""

    def run(given, **options):
        return effgpu.bench(given, **{"seconds": 0.2, "skip": 1, "timeout": 20.0, "logs": tmp_path / "logs"} | options)

    return run


# `tick`


def test_outside_of_a_bench_tick_does_nothing_and_costs_under_a_microsecond():
    code = """
        import sys, timeit, effgpu
        effgpu.tick(items=3, loss=0.5)
        loss, call = 1.0, "effgpu.tick(items=3, loss=loss)"
        seconds = min(timeit.repeat(call, number=10_000, globals=globals()))
        print(seconds / 10_000 < 1e-6, "torch" in sys.modules, len(sys.modules) < 150)
    """
    environment = {name: value for name, value in os.environ.items() if name != ticking.ADDRESS}
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, env=environment
    )
    assert told.stdout == "True False True\n"


def test_a_script_whose_bench_is_gone_ends(script):
    environment = os.environ | {ticking.ADDRESS: "1:token"}
    told = subprocess.run(script().split(), capture_output=True, text=True, env=environment, timeout=20)
    assert told.returncode == 1 and told.stderr == "effgpu.tick: the bench that started this script is gone\n"


# What is measured


def test_a_script_against_itself(script, bench):
    command = script(tick="items=4, loss=1 / step")
    result = bench([command, command], seconds=1.0)
    assert [m.label for m in result] == ["plain", "plain (2)"]
    a, b = result
    assert len(a.turns) == len(b.turns) >= 15
    assert result.verdict(b.label) in ("same", "inconclusive")
    assert 0.002 < a.median < 0.02 and a.items == b.items == 4
    assert result.loss_difference(b.label)[0] == 0 and len(result.losses[a.label].keys() & result.losses[b.label]) > 30
    assert result.steps[a.label] >= 2 * len(a.turns)
    assert result.notes == () and not result.alone and result.min_effect == 0.02
    kept = sorted(result.losses[a.label])
    assert kept[-1] > 60 and kept == [step for step in range(1, kept[-1] + 1) if step <= 50 or step % 10 == 0]
    headings, rows = result.table()
    assert {"time per step", "peak resident memory", "loss at step 1", "steps timed"} <= set(headings)
    assert rows[1][headings.index("largest difference of loss")] == "0"
    assert "One process per command, in turns." in repr(result) and "CPU" in repr(result)
    assert a.device.kind == "cpu" and set(a.device.versions) == {"python"}


def test_slower_is_found_and_more_memory(script, tmp_path, capsys):
    fast, slow = (
        script("time.sleep(0.004)", "items=4", name="a"),
        script("time.sleep(0.012)", "items=4", before="held = b'x' * 2**25", name="b"),
    )
    asked = ["bench", "--seconds", "0.5", "--timeout", "20", fast, slow]
    stored, drawn = tmp_path / "out" / "result.json", tmp_path / "plot.png"
    options = ["--fail-if-slower", "5%", "--unit", "tokens", "--json", str(stored), "--plot", str(drawn)]
    assert main([*asked, *options]) == 3
    told = capsys.readouterr().err
    assert "effgpu: b.py is " in told and " × slower" in told and "more than the 5 % allowed" in told
    assert "memory" not in told
    assert drawn.stat().st_size > 0
    (result,) = results.load(stored)
    assert isinstance(result, Bench) and result.verdict("b.py") == "slower"
    assert [(m.items, m.unit) for m in result] == [(4, "tokens")] * 2
    assert result["b.py"].peak_allocated - result["a.py"].peak_allocated > 2**24
    row = json.loads(stored.read_text())["comparisons"][0]
    assert json.loads(json.dumps(result.to_dict())) == row and row["bench"]["commands"]["a.py"] == fast
    assert result.judge(slower=100, more_memory=100) == ([], [])
    assert main([*asked, "--fail-if-slower", "10000%", "--fail-if-more-memory", "10%"]) == 3
    told = capsys.readouterr().err
    assert "effgpu: the peak resident memory of b.py is +" in told and "more than the 10 % allowed" in told
    assert "slower" not in told


def test_losses_of_the_same_steps_stand_side_by_side(script, bench):
    first = script(tick="loss=1 / step", name="a")
    result = bench([first, script(tick="loss=1 / step + (0.25 if step == 7 else 0)", name="b")])
    assert result.loss_difference("b.py") == (pytest.approx(0.25), 7) and "0.25 (step 7)" in repr(result)
    wrong = bench([first, script(tick="loss=float('nan') if step > 3 else 1 / step", name="c")])
    assert "nan (step 4)" in repr(wrong)
    assert json.loads(json.dumps(wrong.to_dict(), allow_nan=False))["bench"]["losses"]["c.py"][5][1] is None


def test_times_are_per_item_where_items_differ(script, bench):
    result = bench(
        [script("time.sleep(0.003)", "items=8", name="a"), script("time.sleep(0.003)", "items=16", name="b")]
    )
    assert result.per == "item" and result.time_ratio("b.py").value == pytest.approx(0.5, rel=0.3)
    long_and_short = script("time.sleep(0.001 * (1 + 4 * (step // 6 % 2)))", "items=1 + 4 * (step // 6 % 2)", name="c")
    varied = bench([long_and_short])
    assert varied["c.py"].median / varied["c.py"].items == pytest.approx(0.00105, rel=0.8)
    low, _, high = statistics.quantiles(varied["c.py"].times)
    assert high < 1.8 * low  # though turns hold short and long steps
    lacking = bench([script(tick="items=8", name="d"), script(name="e")])
    assert lacking["d.py"].items is None and lacking.time_ratio("e.py").value == pytest.approx(1, rel=0.5)


LOADER = """
    import multiprocessing
    def work(queue):
        while True:
            time.sleep(0.02)
            queue.put(1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue(8)
    workers = [context.Process(target=work, args=(queue,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
"""


def test_steps_do_not_live_on_batches_that_were_loaded_while_the_script_waited(script, bench):
    command = script("queue.get()", before=LOADER)  # two workers of 20 ms a batch: 10 ms a step
    result = bench([command, script("time.sleep(0.02)")], skip=10, seconds=1.0)
    assert 0.0095 < result.baseline.median < 0.03


def test_a_first_step_that_took_no_time_does_not_make_turns_endless(script, bench):
    ready = script("time.sleep(0.01 if step > 12 else 0)")  # as if twelve batches had been waiting in a queue
    result = bench([ready], skip=10, seconds=1.0, timeout=2.0)
    assert result.notes == () and 0.01 < result.baseline.median < 0.02


def test_as_many_first_steps_as_asked_are_not_timed(script, tmp_path):
    stored, slow_first = tmp_path / "result.json", script("time.sleep(0.1 if step <= 10 else 0.002)")
    assert main(["bench", "--skip", "10", "--seconds", "0.2", "--json", str(stored), slow_first]) == 0
    (result,) = results.load(stored)
    assert max(map(max, result.baseline.turns)) < 0.1


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        ([1.0, 1.02], 0),
        ([1.2, 1.22], 3),
        ([1.04, 1.08], 4),  # a part of the interval is above
        ([0.7, 1.6], 4),  # a large regression may hide in a wide interval
        ([], 4),
    ],
)
def test_a_regression_is_judged_by_the_ends_of_the_interval(turns, code, cpu, monkeypatch, capsys):
    times = [(turns[n % 2],) * 2 for n in range(16)] if turns else []
    both = Measurement("a", ((1.0, 1.0),) * 16, cpu), Measurement("b", tuple(times), cpu)
    monkeypatch.setattr(commands, "bench", lambda given, **options: Bench("bench", both))
    assert main(["bench", "a", "b", "--fail-if-slower", "5%"]) == code
    assert ("more than the 5 % allowed" in capsys.readouterr().err) == (code > 0)


# One at a time


LOCK = """
    import fcntl
    lock = open({path!r}, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise {error} from None
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("MemoryError('no room')", "out of memory"),
        ("RuntimeError('CUDA error: CUDA-capable device(s) is/are busy or unavailable')", "refused by the GPU"),
    ],
)
def test_commands_that_cannot_live_together_take_turns_one_at_a_time(error, told, script, bench, tmp_path):
    before = LOCK.format(path=str(tmp_path / "lock"), error=error)
    fast, slow = (script(f"time.sleep({s})", before=before, name=name) for s, name in [(0.002, "a"), (0.02, "b")])
    result = bench([fast, slow])
    assert result.alone and result.verdict("b.py") == "slower" and len(result["b.py"].turns) == 4
    assert result.notes[0].startswith("Measured one at a time: side by side, ") and told in result.notes[0]
    assert "One process at a time, 4 times each" in repr(result)


def test_out_of_memory_alone_is_a_result(script, bench):
    result = bench([script(name="a"), script(before="raise MemoryError('no room')", name="b")])
    assert result.verdict("b.py") == "out of memory" and result.alone
    assert "MemoryError: no room" in result.notes[-1]


def test_a_script_of_a_few_steps_is_measured_by_restarting_it(script, bench):
    command = script(steps=25)
    result = bench([command, command], one_at_a_time=True, seconds=0.1)
    assert result.alone and [len(m.turns) for m in result] == [4, 4] and result.notes == ()


def test_only_rank_0_ticks_and_several_ranks_run_alone(script, bench):
    launcher = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {"RANK": rank, "WORLD_SIZE": "2"}, start_new_session=True)
    for rank in "01"
]
sys.exit(max(rank.wait() for rank in ranks))
"""
    run, training = script(whole=launcher), script()
    result = bench([f"{run} {training}", f"{run} {training}"])
    assert result.alone and "has 2 ranks" in result.notes[0]
    assert [len(m.turns) for m in result] == [4, 4]


# Faults


def failing(result, label="b.py"):
    (note,) = [note for note in result.notes if note.startswith(f"{label}: ")]
    assert str(result.logs[label]) in note and Path(result.logs[label]).exists()
    return result.verdict(label), note


def test_a_baseline_that_fails_ends_the_bench_at_once(script, bench):
    began = time.monotonic()
    result = bench([script(before="raise SystemExit(3)", name="b"), script(whole="import time; time.sleep(60)")])
    assert failing(result)[0] == "failed before its first step" and time.monotonic() - began < 10
    assert "exit code 3" in result.notes[0]


THREADED = """
    import threading
    tick = effgpu.tick
    effgpu.tick = lambda: threading.Thread(target=tick).start()
"""
FORKING = """
import os, time
import effgpu
{first}
if os.fork() == 0:
    effgpu.tick()
    time.sleep(60)
while True:
    time.sleep(0.01)
    effgpu.tick()
"""
LOADING = """
import torch, effgpu
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, at):
        effgpu.tick()
        return at
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    effgpu.tick()
"""


@pytest.mark.parametrize(
    ("training", "short", "told"),
    [
        ({"before": "raise SystemExit('no such data')"}, "failed before its first step", "(exit code 1). Its output"),
        ({"whole": "import time; time.sleep(60)"}, "no tick", "within 1 s: call effgpu.tick() once per step"),
        ({"whole": "print('trained')"}, "no tick", "ended without a call of effgpu.tick"),
        ({"inside": "time.sleep(0.002 if step < 20 else sys.exit())"}, "ended after", "let it train for more steps"),
        ({"inside": "time.sleep(0.002 if step < 20 else 1 / 0)"}, "failed after", "ZeroDivisionError"),
        ({"inside": "step < 9 or os.kill(os.getpid(), 9)", "before": "import os"}, "killed", "SIGKILL"),
        ({"before": THREADED}, "tick was called in a thread", "call it in the training loop, once per step"),
        ({"whole": FORKING.format(first="")}, "two processes tick", "only one may"),
        ({"whole": FORKING.format(first="effgpu.tick()")}, "tick was called in a second process", "once per step"),
        ({"whole": LOADING}, "tick was called in a DataLoader worker", "in the training loop, once per step"),
        ({"tick": "loss=[1, 2]"}, "failed before its first step", "tick(loss=...): expected a number or a tensor"),
        ({"tick": "items=object()"}, "failed after step 1", "tick(items=...): expected a number or a tensor"),
    ],
)
def test_a_fault_is_told_in_a_few_words_and_in_full(training, short, told, script, bench):
    timeout = 1.0 if "within 1 s" in told else 20.0
    verdict, note = failing(bench([script(name="a"), script(**training, name="b")], timeout=timeout))
    assert verdict.startswith(short) and told in note


def test_what_was_measured_before_a_crash_is_kept(script, bench, monkeypatch):
    monkeypatch.setitem(commands._TURN, "cpu", 0.01)
    broken = script("time.sleep(0.004 if step < 300 else 1 / 0)", name="b")
    result = bench([script(name="a"), broken], seconds=30.0, precision=1e-5)
    verdict, note = failing(result)
    assert verdict == "slower" and len(result["b.py"].turns) >= 15
    assert "failed after step" in note and "ZeroDivisionError" in note


def test_a_script_that_hangs(script, bench, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.3)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    hangs = script("time.sleep(0.002 if step < 20 else 600)", before=stubborn, name="b")
    verdict, note = failing(bench([script(name="a"), hangs], timeout=1.0))
    assert verdict.startswith("hangs after step") and "no answer within 1" in note


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}\n"])
def test_a_stranger_at_the_port_is_turned_away(sent, tmp_path):
    process = processes.Process(processes.Command(()), tmp_path / "log", 1.0)
    process._listener = socket.create_server(("127.0.0.1", 0))
    with process._listener, socket.create_connection(process._listener.getsockname()) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        process._admit()
        assert stranger.recv(1) == b"" and process.hello is None


def test_daemons_of_a_script_end_with_it(script, bench):
    bench([script(before="import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)")])


# The whole command


def start_cli(*arguments):
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-m", "effgpu", "bench", "--timeout", "20", *arguments]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )


def ticked(path, often):
    return path.exists() and len(path.read_text().splitlines()) > often


@pytest.mark.slow
def test_ctrl_c_shows_what_was_measured(script, tmp_path):
    seen = tmp_path / "seen"
    command = script(f"time.sleep(0.002); print(step, file=open({str(seen)!r}, 'a'))")
    run = start_cli(command, command, "--seconds", "60", "--precision", "0.001%")
    wait_until(lambda: ticked(seen, 2000), "the scripts do not run", 60)
    run.send_signal(signal.SIGINT)
    printed, errors = run.communicate(timeout=20)
    assert run.returncode == 130 and "Interrupted: this is what had been measured." in printed, errors
    assert "Traceback" not in errors


def test_ctrl_c_at_once_leaves_nothing_behind(script, tmp_path):
    seen = tmp_path / "seen"
    run = start_cli(script(whole=f"open({str(seen)!r}, 'w').write('a\\nb\\n'); import time; time.sleep(60)"))
    wait_until(lambda: ticked(seen, 1), "the script does not run", 60)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=20)
    assert run.returncode == 130 and errors.startswith("effgpu: interrupted before")


def test_scripts_end_if_the_bench_is_killed(script, tmp_path, mark):
    seen = tmp_path / "seen"
    command = script(f"time.sleep(0.002); print(step, file=open({str(seen)!r}, 'a'))", before=LOADER)
    run = start_cli(command, command, "--seconds", "60", "--precision", "0.001%")
    wait_until(lambda: ticked(seen, 100), "the scripts do not run", 60)
    assert len(processes._find_processes(mark)) == 7  # the bench, and two scripts with two workers each
    run.kill()
    run.communicate(timeout=20)
    wait_until(lambda: processes._find_processes(mark) == [], "a process was left behind")


def test_failures_and_refusals_have_exit_codes(script, capsys):
    quick = ["--seconds", "0.2", "--skip", "1", "--timeout", "20"]
    good, broken = script(name="a"), script(before="raise SystemExit(1)", name="b")
    assert main(["bench", good, broken, *quick]) == 1
    assert "failed before its first step" in capsys.readouterr().out

    def is_refused(*arguments, printed):
        code, answer = main(["bench", *arguments]), capsys.readouterr().err
        return code == 2 and answer.startswith("effgpu: error: ") and answer.count("\n") == 1 and printed in answer

    assert is_refused(printed="effgpu bench 'python train.py'")
    assert is_refused(good, "no-such-program train.py", printed="no program 'no-such-program'")
    assert is_refused(good, "--seconds", "0", printed="seconds: expected a positive number")
    assert is_refused(good, "--skip", "-1", printed="skip: expected")
    with pytest.raises(SystemExit) as refused:
        main(["bench", good, "--fail-if-slower", "much"])
    assert refused.value.code == 2 and "invalid percentage value: 'much'" in capsys.readouterr().err
    assert is_refused(good, "--name", "plain", printed="--name: expected LABEL=COMMAND")
    assert is_refused("--name", f"a={good}", "--name", f"a={good}", printed="--name: expected LABEL=COMMAND")
    assert is_refused("--ref", "main", good, printed="refs: expected one command")
    assert is_refused("--ref", "main", "--ref", "other", "--", *good.split(), printed="git")


def test_labels_are_given_or_are_the_arguments_that_differ(script, capsys):
    def named(*lines):
        return commands.name_commands([processes.Command(tuple(line.split())) for line in lines])

    assert named("python train.py", "python train.py --bf16") == ["plain", "--bf16"]
    assert named("python t.py --batch 8 --lr 1", "python t.py --batch 16 --lr 1") == ["--batch 8", "--batch 16"]
    assert named("python a.py", "python b.py --fast") == ["a.py", "b.py --fast"]
    assert named("python x/a.py", "python y/a.py") == ["x/a.py", "y/a.py"]
    assert named("python x/a.py") == ["x/a.py"]
    assert named("python a.py", "python a.py", "python a.py") == ["plain", "plain (2)", "plain (3)"]
    fast = processes.read_command("MODE=fast python3 a.py")
    assert commands.name_commands([processes.read_command("python3 a.py"), fast]) == ["plain", "MODE=fast"]
    quick = ["--seconds", "0.2", "--timeout", "20"]
    assert main(["bench", *quick, "--markdown", "--name", f"one={script()}", "--name", f"two | 2={script()}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| variant | time per step |") and "| two \\| 2 |" in printed and "* one: `" in printed


@pytest.mark.slow
def test_one_command_in_two_commits(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        told = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        return subprocess.run(
            ["git", *told, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    package, folder = tmp_path / "src" / "step_of_test", tmp_path / "scripts"
    package.mkdir(parents=True), folder.mkdir()
    modules = package / "__init__.py", tmp_path / "at_root_of_test.py"
    inside = "step_of_test.run(); at_root_of_test.run()"
    (folder / "train.py").write_text(
        LOOP.format(before="import step_of_test, at_root_of_test", inside=inside, tick="", steps=10**9)
    )
    git("init", "--quiet")
    for branch, seconds in {"main": 0.02, "faster": 0.002}.items():
        for module in modules:
            module.write_text(f"import time\ndef run():\n    time.sleep({seconds})\n")
        git("add", "."), git("commit", "--quiet", "-m", branch), git("branch", "--force", f"at-{branch}")
    for module in modules:
        module.write_text("raise SystemExit('the working tree')")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'src'}:{tmp_path}:{ROOT}")  # as an editable installation has it
    asked = ["bench", "--seconds", "0.3", "--timeout", "20", "--json", str(tmp_path / "r.json")]
    assert main([*asked, "--ref", "at-main", "--ref", "at-faster", "--", sys.executable, "train.py", "--flag"]) == 0
    (result,) = results.load(tmp_path / "r.json")
    assert [m.label for m in result] == ["at-main", "at-faster"] and result.verdict("at-faster") == "faster"
    assert git("worktree", "list").count("\n") == 1 and not list(Path(tempfile.gettempdir()).glob("effgpu-checkout-*"))
    capsys.readouterr()
    assert main(["bench", "--ref", "at-main", "--ref", "nowhere", "--", "python3", "train.py"]) == 2
    assert "nowhere: fatal: invalid reference" in capsys.readouterr().err


# On a GPU


FAKE_TORCH = '''
"""Enough of torch for a script that seems to train on a GPU."""
import os, time
from types import SimpleNamespace
__version__ = "2.15.0"
version = SimpleNamespace(cuda="13.0", hip=None)
device = lambda *_: SimpleNamespace(type="cuda")
class Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self): self.at = time.perf_counter()
    def synchronize(self): pass
    def elapsed_time(self, later):
        assert cuda.waited_at > later.at, "not finished"
        return 1000 * (later.at - self.at)
cuda = SimpleNamespace(
    is_initialized=lambda: True, is_available=lambda: True, current_device=lambda: 0, Event=Event,
    device_count=lambda: 2, max_memory_allocated=lambda gpu=0: 3 * 2**20 * (str(gpu) in os.environ.get("USED", "0")),
    synchronize=lambda: time.sleep(0.02 * ("LATE" in os.environ)) or setattr(cuda, "waited_at", time.perf_counter()),
    is_bf16_supported=lambda **_: True,
    mem_get_info=lambda: (1, 2), get_per_process_memory_fraction=lambda: 1.0,
    get_device_properties=lambda *_: SimpleNamespace(
        name="NVIDIA Test", major=9, minor=0, total_memory=2**34, multi_processor_count=132, uuid="0123"),
)
'''


@pytest.mark.slow
def test_on_a_gpu_events_time_a_turn_and_the_board_counts_energy(script, bench, tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}:{ROOT}")
    monkeypatch.setattr(commands, "_ENERGY_SECONDS", 0.6)
    monkeypatch.setitem(commands._LEAD, "cuda", 0.005)
    monkeypatch.setitem(commands._TURN, "cuda", 0.01)
    monkeypatch.setattr(timing, "_LATE", 1.0)  # other processes may hold this one up by a few milliseconds
    monkeypatch.setattr(power, "find_board", lambda uuid: "board")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda board, kind: 1500)
    monkeypatch.setattr(power, "_throttled", lambda handle: ("power cap",))
    monkeypatch.setattr(power, "read_joules", lambda board: 5.0 * int(time.perf_counter() / 0.05))  # 100 W in ticks
    result = bench(
        [
            script("time.sleep(0.004)", before="import torch", name="a"),
            script("time.sleep(0.008)", before="import torch", name="b"),
        ],
        seconds=0.5,
    )
    a, b = result
    assert a.device.kind == "cuda" and a.device.capability == (9, 0)
    assert 0.004 < a.median < 0.02 and 0.008 < b.median < 0.03
    assert a.peak_allocated == 3 * 2**20
    assert a.joules == pytest.approx(100 * a.median, rel=0.4) and b.joules == pytest.approx(100 * b.median, rel=0.4)
    assert a.sm_clock == 1500 and a.throttled == ("power cap",)
    headings, _ = result.table()
    assert {"peak memory", "energy per step"} <= set(headings)
    monkeypatch.setenv("LATE", "1")
    late = bench([script(before="import torch", name="g")])
    assert "leaves work on another CUDA stream" in late.notes[0] and not any("stream" in note for note in result.notes)
    monkeypatch.delenv("LATE")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    uncounted = bench([f"USED=none {script(before='import torch', name='h')}"]).baseline
    assert (uncounted.device.kind, uncounted.peak_allocated) == ("cuda", None)
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING")
    both = bench([f"USED=01 {script(before='import torch', name='i')}"])
    assert both.baseline.failed and "works on GPUs 0, 1, and effgpu times one" in both.notes[0]
    mixed = bench([script(before="import torch", name="c"), script(name="d")])
    assert mixed["c.py"].peak_allocated and mixed["d.py"].peak_allocated is None
    other = bench([f"USED=1 {script(before='import torch', name='e')}", script(before="import torch", name="f")])
    assert other.baseline.failed and "works on GPU 1, and only the current one (0) is measured" in other.notes[0]


@pytest.mark.gpu
def test_on_this_gpu(script, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    before = "import torch; x = torch.randn(2048, 2048, device='cuda')"
    command = script("y = x @ x", "loss=y[0, 0]", before=before)
    result = effgpu.bench([command, command], seconds=2.0, logs=tmp_path)
    assert result.device.kind == "cuda" and result.verdict(result.measurements[1].label) in ("same", "inconclusive")
    assert result.baseline.peak_allocated >= 2 * 2048**2 * 4


# transformers


TRAINER = """
import sys
import effgpu, torch, transformers
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = transformers.BertForSequenceClassification(config)
row = {"input_ids": torch.arange(8), "labels": torch.tensor(1)}
args = transformers.TrainingArguments(
    OUT, max_steps=100_000, logging_steps=1, report_to=[], per_device_train_batch_size=4, save_strategy="no",
    disable_tqdm=True, use_cpu=True, gradient_checkpointing="--checkpointing" in sys.argv, seed=0)
transformers.Trainer(model, args, train_dataset=[row] * 64, callbacks=[effgpu.TickCallback()]).train()
"""


@pytest.mark.slow
def test_transformers_trainer_with_and_without_a_flag(script, bench, tmp_path):
    command = script(whole=TRAINER.replace("OUT", repr(str(tmp_path / "trained"))))
    result = bench([command, f"{command} --checkpointing"], timeout=100.0)
    assert [m.label for m in result] == ["plain", "--checkpointing"] and result.notes == ()
    assert result.baseline.items == 4 and len(result.baseline.turns) >= 15
    difference, _ = result.loss_difference("--checkpointing")
    assert difference < 1e-3 and min(result.losses["--checkpointing"]) == 1
    assert "torch" in result.device.versions and result.time_ratio("--checkpointing")


def test_the_callback_names_items_and_the_logged_loss(monkeypatch):
    from types import SimpleNamespace

    from effgpu.benching import callbacks

    told = []
    monkeypatch.setattr(callbacks, "tick", lambda **given: told.append((given["items"], given["loss"])))
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2)
    state, callback = SimpleNamespace(num_input_tokens_seen=0), callbacks.TickCallback()
    callback.on_step_begin(args, state, None)
    callback.on_log(args, state, None, logs={"loss": 0.5})
    callback.on_log(args, state, None, logs={"eval_loss": 0.4})
    callback.on_step_begin(args, state, None)
    state.num_input_tokens_seen = 300
    callback.on_step_begin(args, state, None)
    callback.on_log(args, state, None, logs={"eval_loss": 0.4})
    state.num_input_tokens_seen = 700
    callback.on_train_end(args, state, None)
    assert told == [(8, 0.5), (300, None), (400, None)]
