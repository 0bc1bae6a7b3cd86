"""`effgpu bench` with real processes. Most scripts sleep instead of training, so that they start at once."""

import json
import os
import re
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
from types import SimpleNamespace

import pynvml
import pytest

import effgpu
from effgpu import results
from effgpu.__main__ import main
from effgpu.attaching import ticking
from effgpu.attaching.commands import read_command
from effgpu.benching import checks, processes, side_by_side
from effgpu.benching.result import Bench
from effgpu.comparison import CONTROL
from effgpu.measuring import power, timing, turns
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


@pytest.fixture(autouse=True)
def mark(monkeypatch, tmp_path, tmp_path_factory):
    """All processes of a test carry a mark, and none of them outlives it. All files are in pytest's folders."""
    own = uuid.uuid4().hex
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setenv("EFFGPU_TEST", own)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield own
    wait_until(lambda: processes._find_processes(own) == [], "a process was left behind")


def test_two_reports_that_arrive_together_are_two(tmp_path):
    """Else the second waits for a third, as long as `--timeout` lets it."""
    ours, theirs = socket.socketpair()
    process = processes.Process(None, tmp_path / "log", 1.0)
    process._connection, process.last = ticking.Connection(ours), {"step": 0}
    theirs.sendall(b'{"step": 1}\n{"step": 2}\n')
    assert [report["step"] for report in process.follow(2)] == [1, 2]
    theirs.close()
    assert process._connection.receive() is None
    process._connection.close()


def wait_until(holds, otherwise, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def script(inside="time.sleep(0.002)", tick="", *, before="", steps=10**9, name=None, whole=None):
    """Write a script into the test's folder; returns the command that runs it."""
    path = Path(f"{name or uuid.uuid4().hex[:6]}.py")
    path.write_text(whole or LOOP.format(inside=inside, tick=tick, before=textwrap.dedent(before), steps=steps))
    return f"{sys.executable} {path}"


def bench(*commands, **options):
    """`effgpu.bench`, short, with the commands' output in the test's folder."""
    return effgpu.bench(commands, **{"seconds": 0.2, "skip": 1, "timeout": 20.0, "logs": "logs"} | options)


@pytest.mark.skipif(os.name != "posix", reason="no terminals")
def test_a_script_that_asks_its_terminal_for_a_width_gets_one_and_its_input_is_at_its_end():
    before = """
        import os
        assert os.popen("stty size").read().split() == ["24", "80"]
        assert not sys.stdin.read()
    """
    result = bench(script(before=before), script(before=before, name="other"))
    assert not any(measurement.failed for measurement in result)


# `tick`


def test_outside_of_a_bench_tick_does_nothing_and_costs_under_a_microsecond():
    code = """
        import sys, timeit, effgpu
        effgpu.tick(items=3, loss=0.5)
        loss, call = 1.0, "effgpu.tick(items=3, loss=loss)"
        seconds = min(timeit.repeat(call, number=10_000, globals=globals()))
        print(seconds / 10_000 < 1e-6, "torch" in sys.modules, len(sys.modules) < 150)
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert told.stdout == "True False True\n", told.stderr


def test_a_script_whose_bench_is_gone_ends():
    environment = os.environ | {ticking.ADDRESS: "1:token"}
    told = subprocess.run(script().split(), capture_output=True, text=True, env=environment, timeout=20)
    assert told.returncode == 1 and told.stderr == "effgpu.tick: the bench that started this script is gone\n"


# What is measured


def test_a_script_against_itself():
    command = script(tick="items=4, loss=1 / step")
    result = bench(command, command, seconds=1.0)
    a, b = result
    assert (a.label, b.label) == ("plain", "plain (2)")
    assert len(a.turns) == len(b.turns) >= 15
    assert result.verdict(b.label) in ("same", "inconclusive")
    assert 0.002 < a.median < 0.02 and a.items == b.items == 4
    assert result.loss_difference(b.label)[0] == 0
    assert result.steps[a.label] >= 2 * len(a.turns)
    assert result.notes == () and not result.alone and result.min_effect == 0.02
    kept = sorted(result.losses[a.label])
    assert kept[-1] > 60 and kept == [step for step in range(1, kept[-1] + 1) if step <= 50 or step % 10 == 0]
    assert {"time per step", "peak resident memory", "loss at step 1", "steps timed"} <= set(result.table()[0])
    assert "One process per command, in turns." in repr(result)
    assert a.device.kind == "cpu" and set(a.device.versions) == {"python"}


def test_slower_is_found_and_more_memory(tmp_path, capsys):
    fast = script("time.sleep(0.004)", "items=4", name="a")
    slow = script("time.sleep(0.012)", "items=4", before="held = b'x' * 2**25", name="b")
    stored, drawn = tmp_path / "out" / "result.json", tmp_path / "plot.png"
    options = ["--seconds", "0.5", "--timeout", "20", "--unit", "tokens", "--json", str(stored), "--plot", str(drawn)]
    assert main(["bench", fast, slow, *options, "--fail-if-slower", "5%", "--fail-if-more-memory", "10%"]) == 3
    told = capsys.readouterr().err
    assert re.search(r"^effgpu: b\.py is .* × slower .*, more than the 5 % allowed$", told, re.M)
    assert re.search(r"^effgpu: the peak resident memory of b\.py is \+.*, more than the 10 % allowed$", told, re.M)
    assert drawn.stat().st_size > 0
    (result,) = results.load(stored)
    assert isinstance(result, Bench) and result.verdict("b.py") == "slower"
    assert [(m.items, m.unit) for m in result] == [(4, "tokens")] * 2
    assert result["b.py"].peak_allocated - result["a.py"].peak_allocated > 2**24
    row = json.loads(stored.read_text())["comparisons"][0]
    assert json.loads(json.dumps(result.to_dict())) == row and row["bench"]["commands"]["a.py"] == fast
    assert result.judge() == result.judge(slower=100, more_memory=100) == ([], [])


def test_losses_of_the_same_steps_stand_side_by_side():
    first = script(tick="loss=1 / step", name="a")
    result = bench(first, script(tick="loss=1 / step + (0.25 if step == 7 else 0)", name="b"))
    assert result.loss_difference("b.py") == (pytest.approx(0.25), 7) and "0.25 (step 7)" in repr(result)
    wrong = bench(first, script(tick="loss=float('nan') if step > 3 else 1 / step", name="c"))
    assert "nan (step 4)" in repr(wrong)
    assert json.loads(json.dumps(wrong.to_dict(), allow_nan=False))["bench"]["losses"]["c.py"][5][1] is None


def test_times_are_per_item_where_items_differ():
    result = bench(*(script("time.sleep(0.003)", f"items={items}", name=name) for items, name in [(8, "a"), (16, "b")]))
    assert result.per == "item" and result.time_ratio("b.py").value == pytest.approx(0.5, rel=0.3)
    (varied,) = bench(script("time.sleep(0.001 * (1 + 4 * (step // 6 % 2)))", "items=1 + 4 * (step // 6 % 2)"))
    assert varied.median / varied.items == pytest.approx(0.00105, rel=0.8)
    low, _, high = statistics.quantiles(varied.times)
    assert high < 1.8 * low  # though turns hold short and long steps
    lacking = bench(script(tick="items=8", name="d"), script(tick="items=float('nan')", name="e"))
    assert lacking["d.py"].items is None and lacking.time_ratio("e.py").value == pytest.approx(1, rel=0.5)
    lacking = bench(script(tick="items=8", name="d"), script(name="e"))
    assert lacking["d.py"].items is None and lacking.time_ratio("e.py").value == pytest.approx(1, rel=0.5)


LOADER = """
    import multiprocessing
    def work(queue):
        while True:
            time.sleep(0.02)
            queue.put(1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue(8)
    for _ in range(2):
        context.Process(target=work, args=(queue,), daemon=True).start()
"""


def test_steps_do_not_live_on_batches_that_were_loaded_while_the_script_waited():
    command = script("queue.get()", before=LOADER)  # two workers of 20 ms a batch: 10 ms a step
    result = bench(command, script("time.sleep(0.02)"), skip=10, seconds=1.0)
    assert 0.0095 < result.baseline.median < 0.03


def test_a_first_step_that_took_no_time_does_not_make_turns_endless():
    ready = script("time.sleep(0.01 if step > 12 else 0)")  # as if twelve batches had been waiting in a queue
    result = bench(ready, skip=10, seconds=1.0, timeout=2.0)
    assert result.notes == () and 0.01 < result.baseline.median < 0.02


def test_as_many_first_steps_as_asked_are_not_timed():
    (measured,) = bench(script("time.sleep(0.1 if step <= 10 else 0.002)"), skip=10)
    assert max(map(max, measured.turns)) < 0.1


def test_of_one_command_alone_it_is_said_that_nothing_is_compared(cpu):
    both = Measurement("a", ((1.0, 1.0),) * 16, cpu), Measurement("b", ((1.0, 1.0),) * 16, cpu)
    assert "\nNothing to compare with: give a second command, or --control." in Bench("bench", both[:1]).caption()
    assert "Nothing to compare" not in Bench("bench", both).caption()


# 4: a part of the interval is above, or it is so wide that a large regression may hide in it, or there is none
@pytest.mark.parametrize("turns, code", [([1, 1.02], 0), ([1.2, 1.22], 3), ([1.04, 1.08], 4), ([0.7, 1.6], 4), ([], 4)])
def test_a_regression_is_judged_by_the_ends_of_the_interval(turns, code, cpu, monkeypatch, capsys):
    times = [(turns[n % 2],) * 2 for n in range(16)] if turns else []
    both = Measurement("a", ((1.0, 1.0),) * 16, cpu), Measurement("b", tuple(times), cpu)
    control = Measurement(CONTROL, ((1.2, 1.22),) * 16, cpu)  # which is not judged
    monkeypatch.setattr("effgpu.benching.bench.bench", lambda given, **options: Bench("bench", (*both, control)))
    assert main(["bench", "true", "true", "--fail-if-slower", "5%"]) == code
    assert ("more than the 5 % allowed" in capsys.readouterr().err) == (code > 0)


@pytest.mark.parametrize("peaks, code", [((100, 109), 0), ((100, 111), 3), ((100, None), 4), ((None, 100), 4)])
def test_memory_that_is_not_known_is_not_within_what_is_allowed(peaks, code, cpu, monkeypatch, capsys):
    """As of a script that trains on the GPU beside one on the CPU."""
    both = [Measurement(label, ((1.0, 1.0),) * 16, cpu, peak_allocated=peak) for label, peak in zip("ab", peaks)]
    monkeypatch.setattr("effgpu.benching.bench.bench", lambda given, **options: Bench("bench", tuple(both)))
    assert main(["bench", "true", "true", "--fail-if-more-memory", "10%"]) == code
    assert ("more than the 10 % allowed" in capsys.readouterr().err) == (code > 0)


# One at a time


LOCK = """
    import fcntl
    lock = open("lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise {error} from None
"""


BUSY = "RuntimeError('CUDA error: CUDA-capable device(s) is/are busy or unavailable')"


@pytest.mark.parametrize("error, told", [("MemoryError('no room')", "out of memory"), (BUSY, "refused by the GPU")])
def test_commands_that_cannot_live_together_take_turns_one_at_a_time(error, told):
    before = LOCK.format(error=error)
    result = bench(script(before=before, name="a"), script("time.sleep(0.02)", before=before, name="b"))
    assert result.alone and result.verdict("b.py") == "slower" and len(result["b.py"].turns) == 4
    assert result.notes[0].startswith("Measured one at a time: side by side, ") and told in result.notes[0]
    assert "One process at a time, 4 times each" in repr(result)


def test_a_script_of_a_few_steps_is_measured_by_restarting_it():
    result = bench(*[script(steps=25)] * 2, one_at_a_time=True, seconds=0.1)
    assert result.alone and [len(m.turns) for m in result] == [4, 4] and result.notes == ()


def test_only_rank_0_ticks_and_several_ranks_run_alone():
    launcher = """
import os, subprocess, sys
for rank in "01":
    environment = os.environ | {"RANK": rank, "WORLD_SIZE": "2"}
    last = subprocess.Popen(sys.argv[1:], env=environment, start_new_session=True)
last.wait()
"""
    result = bench(*[f"{script(whole=launcher)} {script()}"] * 2)
    assert result.alone and "has 2 ranks" in result.notes[0]
    assert [len(m.turns) for m in result] == [4, 4]


# Faults


def failing(result):
    (note,) = [note for note in result.notes if note.startswith("b.py: ")]
    assert result.logs["b.py"] in note and Path(result.logs["b.py"]).exists()
    return result.verdict("b.py"), note


def test_a_baseline_that_fails_ends_the_bench_at_once():
    began = time.monotonic()
    result = bench(
        script(before="print('9' * 9999)\nraise SystemExit(3)", name="b"), script(whole="import time; time.sleep(60)")
    )
    verdict, note = failing(result)
    assert verdict == "failed before its first step" and "exit code 3" in note and len(note) < 1000
    assert time.monotonic() - began < 10


THREAD = {"before": "import threading", "inside": "threading.Thread(target=effgpu.tick).start()"}
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FORK = "import os\nif os.fork() == 0:\n    effgpu.tick()\n    time.sleep(60)"
LOADING = """
    import torch
    batches = iter(torch.utils.data.DataLoader([1] * 99, num_workers=1, collate_fn=lambda _: effgpu.tick()))
"""


@pytest.mark.parametrize(
    ("training", "short", "told"),
    [
        ({"before": "raise SystemExit('no such data')"}, "failed before its first step", "(exit code 1). Its output"),
        ({"before": "raise MemoryError('no room')"}, "out of memory", "MemoryError: no room"),
        ({"whole": "import time; time.sleep(60)"}, "no step", "within 1 s: let it train with an optimizer"),
        ({"whole": "print('trained')"}, "no step", "or call effgpu.tick() once per step"),
        ({"inside": "time.sleep(0.002 if step < 20 else sys.exit())"}, "ended after", "let it train for more steps"),
        ({"inside": "time.sleep(0.002 if step < 20 else 1 / 0)"}, "failed after", "ZeroDivisionError"),
        (
            {"before": "print('smaller batches if it runs out of memory')", "tick": "loss=1 / 0"},
            "failed before its first step",
            "ZeroDivisionError",
        ),
        ({"inside": "step < 9 or os.kill(os.getpid(), 9)", "before": "import os"}, "killed", "SIGKILL"),
        ({"inside": "time.sleep(0.002 if step < 20 else 600)", "before": STUBBORN}, "hangs after step", "within 1"),
        (THREAD, "tick was called in a thread", "call it in the training loop, once per step"),
        ({"before": FORK}, "two processes train", "only one may"),
        ({"before": f"effgpu.tick()\n{FORK}"}, "tick was called in a second process", "once per step"),
        ({"before": LOADING, "inside": "next(batches)"}, "tick was called in a DataLoader worker", "once per step"),
        ({"tick": "loss=[1, 2]"}, "failed before its first step", "tick(loss=...): expected a number or a tensor"),
        ({"tick": "items=object()"}, "failed after step 1", "tick(items=...): expected a number or a tensor"),
    ],
)
def test_a_fault_is_told_in_a_few_words_and_in_full(training, short, told, monkeypatch):
    timeout, grace = (1.0, 0.3) if "within 1" in told else (20.0, processes._GRACE)
    monkeypatch.setattr(processes, "_GRACE", grace)
    verdict, note = failing(bench(script(name="a"), script(**training, name="b"), timeout=timeout))
    assert verdict.startswith(short) and told in note


def test_what_was_measured_before_a_crash_is_kept(monkeypatch):
    monkeypatch.setitem(turns.OF_SCRIPTS.shortest, "cpu", 0.01)
    broken = script("time.sleep(0.004 if step < 200 else 1 / 0)", name="b")
    result = bench(script(name="a"), broken, seconds=30.0, precision=1e-5)
    verdict, note = failing(result)
    assert verdict == "slower" and len(result["b.py"].turns) >= 15
    assert "failed after step" in note and "ZeroDivisionError" in note
    ending = bench(script(name="a"), script(steps=200, name="c"), seconds=30.0, precision=1e-5)
    assert len(ending["c.py"].turns) >= 15 and "ended after step" in ending.notes[0]
    assert ending.crashed == () and Bench.from_dict(result.to_dict()).crashed == ("b.py",)
    for found, code in ((result, 1), (ending, 0)):
        monkeypatch.setattr("effgpu.benching.bench.bench", lambda given, found=found, **options: found)
        assert main(["bench", "true", "true"]) == code


def test_strangers_at_the_port_are_turned_away():
    before = """
        import os, socket
        for sent in (b"GET / HTTP/1.1\\r\\n", b"[]\\n", b"{}\\n"):
            with socket.create_connection(("127.0.0.1", int(os.environ["EFFGPU_BENCH"].split(":")[0]))) as stranger:
                stranger.sendall(sent)
                assert stranger.recv(1) == b""
    """
    assert bench(script(before=before)).notes == ()


def test_daemons_of_a_script_end_with_it():  # or the fixture `mark` finds them
    bench(script(before="import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"))


# The whole command


def interrupt(commands, sent=signal.SIGINT, steps=1, before_it=lambda: None):
    """Start a long bench, send it a signal after so many lines in the file `seen`; returns exit code and output."""
    options = ["--timeout", "20", "--seconds", "60", "--precision", "0.001%"]
    run = subprocess.Popen(
        [sys.executable, "-m", "effgpu", "bench", *options, *commands],
        env=os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": tempfile.gettempdir()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    seen = Path("seen")
    wait_until(lambda: seen.exists() and seen.read_text().count("\n") >= steps, "the scripts do not run", 60)
    before_it()
    run.send_signal(sent)
    printed, errors = run.communicate(timeout=20)
    assert "Traceback" not in errors
    return run.returncode, printed, errors


SEEN = "time.sleep(0.002); print(step, file=open('seen', 'a'))"


@pytest.mark.slow
def test_ctrl_c_shows_what_was_measured():
    code, printed, errors = interrupt([script(SEEN)] * 2, steps=2000)
    assert code == 130 and "Interrupted: this is what had been measured." in printed, errors


def test_ctrl_c_at_once_leaves_nothing_behind():
    code, _, errors = interrupt([script(whole="print(1, file=open('seen', 'a')); import time; time.sleep(60)")])
    assert code == 130 and errors.startswith("effgpu: interrupted before")


def test_nothing_interrupts_the_end_of_processes_and_a_handler_of_the_readers_own_stays():
    """As a workflow that is cancelled sends first one signal, then the other."""
    seen = []
    of_interrupts = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in a shell's background
    for handler in (signal.default_int_handler, lambda *_: seen.append("told")):
        before = signal.signal(signal.SIGTERM, handler)
        try:
            with processes.ignore_interrupts():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is handler
        finally:
            signal.signal(signal.SIGTERM, before)
    assert seen == ["told"] and signal.getsignal(signal.SIGINT) is of_interrupts


def test_scripts_end_if_the_bench_is_killed(mark):
    def all_run():
        assert len(processes._find_processes(mark)) == 7  # the bench, and two scripts with two workers each

    interrupt([script(SEEN, before=LOADER)] * 2, signal.SIGKILL, steps=100, before_it=all_run)
    wait_until(lambda: processes._find_processes(mark) == [], "a process was left behind")


def test_failures_and_refusals_have_exit_codes_and_labels_stand_in_a_markdown_table(capsys):
    commands = ["--name", f"one={script()}", "--name", f"two | 2={script(before='raise SystemExit(1)')}"]
    assert main(["bench", "--markdown", "--skip", "1", "--timeout", "20", *commands]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("| variant |") and "\n| two \\| 2 | failed before its first step |" in printed
    assert "* one: `" in printed
    assert main(["bench", "true", "--fail-if-slower", "much"]) == 2
    assert "invalid percentage value: 'much'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "effgpu bench 'python train.py'"),
        (["true", "no-such-program train.py"], "no program 'no-such-program'"),
        (["true", "--seconds", "0"], "seconds: expected a positive number"),
        (["true", "--skip", "-1"], "skip: expected"),
        (["true", "--name", "plain"], "--name: expected LABEL=COMMAND"),
        (["--name", "a=true", "--name", "a=true"], "--name: expected LABEL=COMMAND"),
        (["--ref", "main", "true"], "refs: expected one command"),
        (["--ref", "main", "--ref", "other", "--", "true"], "git"),
    ],
)
def test_what_cannot_be_benched_is_refused_in_one_line(arguments, told, capsys):
    assert main(["bench", *arguments]) == 2
    answer = capsys.readouterr().err
    assert answer.startswith("effgpu: error: ") and answer.count("\n") == 1 and told in answer


def test_the_words_of_one_command_need_no_quotes(monkeypatch):
    asked = []

    def note(commands, *_, **options):
        asked.append(commands)
        raise ValueError("noted")

    monkeypatch.setattr("effgpu.benching.checks.check", note)
    for words in (["python3", "train.py", "a b"], ["torchrun", "train.py"], ["a.sh", "b.sh"], ["python a.py", "b.sh"]):
        assert main(["bench", "--", *words]) == 2
    assert asked == [["python3 train.py 'a b'"], ["torchrun train.py"], ["a.sh", "b.sh"], ["python a.py", "b.sh"]]


def test_labels_are_the_arguments_that_differ():
    def named(*lines):
        return checks.name_commands(list(map(read_command, lines)))

    assert named("true train.py", "true train.py --bf16") == ["plain", "--bf16"]
    assert named("true t.py --batch 8 --lr 1", "true t.py --batch 16 --lr 1") == ["--batch 8", "--batch 16"]
    assert named("true x/a.py", "true y/a.py --fast") == ["x/a.py", "y/a.py --fast"]
    assert named("true x/a.py") == ["x/a.py"] == named("true x/a.py --size 10")
    assert named("python -m package.train --lr 1") == ["-m package.train"] and named("true") == ["true"]
    assert named("true a.py", "true a.py", "true a.py") == ["plain", "plain (2)", "plain (3)"]
    assert named("true a.py", "MODE=fast true a.py") == ["plain", "MODE=fast"]


@pytest.mark.slow
def test_one_command_in_two_commits(tmp_path, monkeypatch, capsys):
    def git(*arguments):
        told = ["-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        return subprocess.run(["git", *told, *arguments], check=True, capture_output=True, text=True).stdout

    package, folder = tmp_path / "src" / "step_of_test", tmp_path / "scripts"
    package.mkdir(parents=True), folder.mkdir()
    modules = package / "__init__.py", tmp_path / "at_root_of_test.py"
    monkeypatch.chdir(folder)
    before = "import step_of_test, at_root_of_test"
    command = script("step_of_test.run(); at_root_of_test.run()", before=before).split()
    git("init", "--quiet")
    for branch, seconds in {"main": 0.02, "faster": 0.002}.items():
        for module in modules:
            module.write_text(f"import time\ndef run():\n    time.sleep({seconds})\n")
        git("add", "."), git("commit", "--quiet", "-m", branch), git("branch", "--force", f"at-{branch}")
    for module in modules:
        module.write_text("raise SystemExit('the working tree')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'src'}:{tmp_path}:{ROOT}")  # as an editable installation has it
    asked = ["bench", "--seconds", "0.3", "--timeout", "20", "--json", str(tmp_path / "r.json")]
    assert main([*asked, "--ref", "at-main", "--ref", "at-faster", "--", *command, "--flag"]) == 0
    (result,) = results.load(tmp_path / "r.json")
    assert [m.label for m in result] == ["at-main", "at-faster"] and result.verdict("at-faster") == "faster"
    assert git("worktree", "list").count("\n") == 1 and not list(Path(tempfile.gettempdir()).glob("effgpu-checkout-*"))
    capsys.readouterr()
    assert main(["bench", "--ref", "at-main", "--ref", "nowhere", "--", "python3", "train.py"]) == 2
    assert "nowhere: fatal: invalid reference" in capsys.readouterr().err


# Scripts as they are

BUILD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(1000, 8)), 16, shuffle=True, drop_last=True)
count = 0
"""
LOOP_AS_IT_IS = """
while True:
    for (batch,) in loader:
        count += 1
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
AS_IT_IS = BUILD + LOOP_AS_IT_IS
IN_A_FUNCTION = "def main(rank=0):\n" + textwrap.indent(AS_IT_IS, "    ") + "\nif __name__ == '__main__':\n    {call}\n"
UPDATE = "optimizer.step()\n        optimizer.zero_grad()"
CLOSURE = """
while True:
    for (batch,) in loader:
        def closure():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
"""
BY_HAND = """
        for weight in model.parameters():
            weight.data -= 1e-3 * weight.grad
            weight.grad = None
"""
CATCHING = """
while True:
    for (batch,) in loader:
        try:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            raise ValueError
        except:
            pass
"""
SECOND = "other = torch.nn.Linear(8, 1)\nsecond = torch.optim.Adam(other.parameters())\n"
ACCUMULATES = LOOP_AS_IT_IS.replace(UPDATE, f"if count % 4 == 0:\n            {UPDATE.replace('  ' * 4, '  ' * 6)}")
FAILING = """
try:
    optimizer.step(lambda: 1 / 0)
except ZeroDivisionError:
    pass
"""
KINDS = {  # of scripts without a tick: the code, what ends a step, the samples of one
    "plain": (AS_IT_IS, "SGD", 16),
    "accumulates": (BUILD + ACCUMULATES, "SGD", 64),
    "fails once": (BUILD + FAILING + ACCUMULATES, "SGD", 64),
    "closure": (BUILD.replace("SGD(model.parameters(), lr=1e-3)", "LBFGS(model.parameters())") + CLOSURE, "LBFGS", 16),
    "two optimizers": (
        BUILD + SECOND + LOOP_AS_IT_IS + "        other(torch.randn(4, 8)).mean().backward()\n        second.step()\n",
        "SGD",
        16,
    ),
    "no optimizer": (
        BUILD.replace("optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)", "")
        + LOOP_AS_IT_IS.replace(f"        {UPDATE}\n", BY_HAND),
        ticking.BACKWARD,
        16,
    ),
    "evaluates": (
        BUILD + LOOP_AS_IT_IS + "        for (other,) in loader:\n            model(other)\n            break\n",
        "SGD",
        16,
    ),
    "workers": (
        BUILD.replace("drop_last=True", "drop_last=True, num_workers=2, persistent_workers=True") + LOOP_AS_IT_IS,
        "SGD",
        16,
    ),
    "own batches": (
        BUILD.replace("16, shuffle=True, drop_last=True", "batch_sampler=[[1, 2, 3], [4, 5, 6]]") + LOOP_AS_IT_IS,
        "SGD",
        3,
    ),
    "scaled": (
        BUILD
        + 'scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=10**9)\n'
        + LOOP_AS_IT_IS.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
            "optimizer.step()", "scaler.step(optimizer)\n        scaler.update()"
        ),
        "SGD",
        16,
    ),
    "catches all": (BUILD + CATCHING, "SGD", 16),
    "looks for it first": ("from importlib.util import find_spec\nassert find_spec('torch')\n" + AS_IT_IS, "SGD", 16),
    "in a function": (IN_A_FUNCTION.format(call="main()"), "SGD", 16),
    "spawned": (
        IN_A_FUNCTION.format(call="torch.multiprocessing.spawn(main, nprocs=1)").replace("def", "import torch\ndef", 1),
        "SGD",
        16,
    ),
    "forked": (
        IN_A_FUNCTION.format(call="torch.multiprocessing.start_processes(main, nprocs=1, start_method='fork')").replace(
            "def", "import torch\ndef", 1
        ),
        "SGD",
        16,
    ),
    "ticks": ("import effgpu\n" + AS_IT_IS + "        effgpu.tick(items=5)\n", ticking.TICKS, 5),
    "ticks now and then": (
        "import effgpu\n" + AS_IT_IS + "        count % 9 or effgpu.tick(items=7, loss=count)\n",
        ticking.TICKS,
        7,
    ),
}


@pytest.fixture(scope="module")
def as_they_are(tmp_path_factory):
    """One bench of all kinds of scripts, none of which was changed."""
    folder = tmp_path_factory.mktemp("scripts")
    given = {}
    for kind, (code, *_) in KINDS.items():
        path = folder / f"{kind.replace(' ', '_')}.py"
        path.write_text(code)
        given[kind] = [sys.executable, str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return effgpu.bench(given, seconds=0.1, timeout=100.0, logs=folder / "logs")


@pytest.mark.slow  # eighteen processes import PyTorch
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_without_a_tick_is_benched_as_it_is(kind, as_they_are):
    _, source, samples = KINDS[kind]
    assert not as_they_are[kind].failed and as_they_are.notes == ()
    assert as_they_are.sources[kind] == source and as_they_are[kind].items == samples
    assert len(as_they_are[kind].turns) >= 8


@pytest.mark.slow
def test_the_losses_are_what_backward_was_called_on(as_they_are):
    losses = {kind: list(found.items())[:4] for kind, found in as_they_are.losses.items()}
    plain = losses["plain"]
    assert [step for step, _ in plain] == [1, 2, 3, 4] and len({loss for _, loss in plain}) == 4
    unscaled = [loss for _, loss in losses["scaled"]]
    assert unscaled == pytest.approx([loss for _, loss in plain], rel=1e-3)
    for kind in ("workers", "in a function", "spawned", "forked", "ticks", "catches all"):
        assert losses[kind][0] == plain[0], kind
    assert losses["accumulates"][0][1] > 2 * plain[0][1], "the sum of four passes"
    assert losses["fails once"] == losses["accumulates"]
    assert losses["closure"][0] == plain[0], "of the first pass alone"
    assert losses["ticks now and then"] == [(1, 9), (2, 18), (3, 27), (4, 36)], "what a script says itself goes first"


def test_what_is_no_batch_of_known_size_has_no_items():
    """A batch that no DataLoader gave, or of a loader that does not batch."""
    alone = script(whole=BUILD.replace("16, shuffle=True, drop_last=True", "batch_size=None") + LOOP_AS_IT_IS)
    (measured,) = bench(alone, seconds=0.1, timeout=60.0)
    assert measured.items is None and measured.median


MODULE = "from .own import build\ncount = 0\nmodel, optimizer, loader = build()\n" + LOOP_AS_IT_IS
OWN = "def build():\n" + textwrap.indent(BUILD, "    ") + "    return model, optimizer, loader\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["-m package.train", "-m accelerate.commands.launch --cpu train.py", "torchrun", "sh"]
)
def test_a_launcher_starts_what_it_starts(launcher, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "own.py").write_text(OWN)
    (tmp_path / "package" / "train.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(AS_IT_IS)
    (tmp_path / "run.sh").write_text(f"cd {tmp_path} && exec {sys.executable} train.py\n")
    words = {"torchrun": "-m torch.distributed.run --standalone --nproc_per_node 1 train.py"}.get(launcher, launcher)
    command = "sh run.sh" if launcher == "sh" else f"{sys.executable} {words}"
    (measured,) = result = bench(command, seconds=0.1, timeout=100.0)
    assert result.notes == () and measured.items == 16 and list(result.sources.values()) == ["SGD"]


@pytest.mark.slow
def test_several_processes_that_train_and_threads_that_do_are_refused_in_one_sentence():
    code = "import torch.multiprocessing\n" + IN_A_FUNCTION.format(call="torch.multiprocessing.spawn(main, nprocs=2)")
    both = bench(script(whole=code, name="b"), seconds=5, timeout=60.0)  # until the second process trains, too
    assert both.verdict("b.py") == "two processes train" and "only one may" in both.notes[0]
    call = "thread = threading.Thread(target=main)\n    thread.start()\n    thread.join()"
    code = "import threading, torch\n" + IN_A_FUNCTION.format(call=call)
    thread = bench(script(whole=code, name="b"), seconds=0.1, timeout=60.0)
    assert thread.verdict("b.py") == "a step was made in a thread" and "in its main thread" in thread.notes[0]


def test_another_sitecustomize_runs_as_ever_and_the_scripts_path_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.was_here = True\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    before = "assert was_here and not any('startup' in place for place in sys.path), sys.path"
    assert bench(script(before=before)).notes == ()


def test_a_python_without_effgpu_is_named(tmp_path):
    python = Path(sys.base_prefix, "bin", "python3")
    if (
        not python.exists()
        or subprocess.run([python, "-c", "import effgpu"], env={}, capture_output=True).returncode == 0
    ):
        pytest.skip("no such Python")
    Path("torch.py").write_text("")
    result = bench(f"PYTHONPATH= {python} {script(whole='import torch').split()[1]}")
    assert result.baseline.failed == "no effgpu" and "pip install it there" in result.notes[0]


# Where it is, and what it will take


def test_steps_that_are_long_take_the_fewest_blocks_and_say_so_before(capsys, monkeypatch):
    monkeypatch.setattr(turns, "_NO_LONG_WAIT", 1.0)
    slow = script("time.sleep(0.3)")
    result = bench(slow, slow, seconds=0.5)
    assert len(result.baseline.turns) == 8 and result.steps[result.baseline.label] == 16
    said = capsys.readouterr().err
    assert re.search(
        r"^effgpu: a step takes plain 3.. ms, .* 3.. ms; measuring takes about \d.* s, the least", said, re.M
    )
    short = script()
    bench(short, short)
    assert re.fullmatch(r"effgpu: a step takes .*; measuring takes about .*\n", capsys.readouterr().err), "and no more"


def test_json_goes_to_standard_output_and_has_the_verdicts(capsys):
    command = script("time.sleep(0.004)")
    assert main(["bench", command, script("time.sleep(0.012)", name="b"), "--seconds", "0.2", "--json", "-"]) == 0
    stored = json.loads(capsys.readouterr().out)
    verdict = stored["bench"]["verdicts"]["b.py"]
    assert verdict["verdict"] == "slower" and 1 < verdict["low"] < verdict["ratio"] < verdict["high"]
    assert results.comparison_from_dict(stored).verdict("b.py") == "slower"


def test_a_control_is_the_baselines_copy_and_several_verdicts_share_the_confidence():
    one, two, three = bench(script(name="a"), script("time.sleep(0.008)", name="b"), control=True)
    assert [m.label for m in (one, two, three)] == ["a.py", "control (the baseline again)", "b.py"]
    result = bench(script(name="a"), script("time.sleep(0.008)", name="b"), control=True)
    assert result.confidence == pytest.approx(0.995) and result.verdict("b.py") == "slower"
    assert "for all of them together. The control shows the noise of this machine." in repr(result)


# On a GPU


FAKE_TORCH = '''
"""Enough of torch for a script that seems to train on a GPU."""
import os, time
from types import SimpleNamespace
__version__ = "2.15.0"
version = SimpleNamespace(cuda="13.0", hip=None)
device, dtype, Tensor, UntypedStorage = lambda *_: SimpleNamespace(type="cuda"), type, type, type
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
def test_on_a_gpu_events_time_a_turn_and_the_board_counts_energy(tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}:{ROOT}")
    monkeypatch.setattr(side_by_side, "_ENERGY_SECONDS", 0.6)
    monkeypatch.setitem(turns.OF_SCRIPTS.lead, "cuda", 0.005)
    monkeypatch.setitem(turns.OF_SCRIPTS.shortest, "cuda", 0.01)
    monkeypatch.setattr(timing, "_LATE", 1.0)  # other processes may hold this one up by a few milliseconds
    monkeypatch.setattr(power, "find_board", lambda uuid: "board")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda board, kind: 1500)
    monkeypatch.setattr(power, "_throttled", lambda handle: ("power cap",))
    monkeypatch.setattr(power, "read_joules", lambda board: 5.0 * int(time.perf_counter() / 0.05))  # 100 W in ticks
    on_gpu = script(before="import torch")
    result = bench(on_gpu, script("time.sleep(0.008)", before="import torch"), seconds=0.5)
    a, b = result
    assert a.device.kind == "cuda" and a.device.capability == (9, 0)
    assert 0.002 < a.median < 0.02 and 0.008 < b.median < 0.03
    assert a.peak_allocated == 3 * 2**20
    assert a.joules == pytest.approx(100 * a.median, rel=0.4) and b.joules == pytest.approx(100 * b.median, rel=0.4)
    assert a.sm_clock == 1500 and a.throttled == ("power cap",)
    assert {"peak memory", "energy per step"} <= set(result.table()[0]) and result.notes == ()
    assert "leaves work on another CUDA stream" in bench(f"LATE=1 {on_gpu}").notes[0]
    uncounted = bench(f"PYTORCH_NO_CUDA_MEMORY_CACHING=1 USED=none {on_gpu}").baseline
    assert (uncounted.device.kind, uncounted.peak_allocated) == ("cuda", None)
    both, other = bench(f"USED=01 {on_gpu}"), bench(f"USED=1 {on_gpu}")
    assert both.baseline.failed and "works on GPUs 0, 1, and effgpu times one" in both.notes[0]
    assert other.baseline.failed and "works on GPU 1, and only the current one (0) is measured" in other.notes[0]
    gpu, cpu = bench(on_gpu, script())
    assert gpu.peak_allocated and cpu.peak_allocated is None


@pytest.mark.gpu
def test_on_this_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    before = "import torch; x = torch.randn(2048, 2048, device='cuda')"
    command = script("y = x @ x", "loss=y[0, 0]", before=before)
    result = effgpu.bench([command, command], seconds=2.0, logs=tmp_path)
    assert result.device.kind == "cuda" and result.verdict(result.measurements[1].label) in ("same", "inconclusive")
    assert result.baseline.peak_allocated >= 2 * 2048**2 * 4


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
    "trained", max_steps=100_000, logging_steps=1, report_to=[], per_device_train_batch_size=4, save_strategy="no",
    disable_tqdm=True, use_cpu=True, gradient_checkpointing="--checkpointing" in sys.argv, seed=0)
transformers.Trainer(model, args, train_dataset=[row] * 64, callbacks=[effgpu.TickCallback()]).train()
"""


@pytest.mark.slow
def test_transformers_trainer_with_and_without_a_flag():
    command = script(whole=TRAINER)
    result = bench(command, f"{command} --checkpointing", timeout=100.0)
    assert [m.label for m in result] == ["plain", "--checkpointing"] and result.notes == ()
    assert result.baseline.items == 4 and len(result.baseline.turns) >= 15
    difference, _ = result.loss_difference("--checkpointing")
    assert difference < 1e-3 and min(result.losses["--checkpointing"]) == 1
    assert "torch" in result.device.versions and result.time_ratio("--checkpointing")


def test_the_callback_names_items_and_the_logged_loss(monkeypatch):
    from effgpu.benching import callbacks

    told = []
    monkeypatch.setattr(callbacks, "tick", lambda items, loss: told.append((items, loss)))
    args = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2)
    state, callback = SimpleNamespace(num_input_tokens_seen=0), effgpu.TickCallback()
    callback.on_step_begin(args, state, None)
    for loss in ("loss", "eval_loss"):
        callback.on_log(args, state, None, logs={loss: 0.5})
    for seen in (0, 300):
        state.num_input_tokens_seen = seen
        callback.on_step_begin(args, state, None)
    state.num_input_tokens_seen = 700
    callback.on_train_end(args, state, None)
    assert told == [(8, 0.5), (300, None), (400, None)]
