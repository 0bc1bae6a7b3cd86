"""`effgpu bench`: training scripts as they are, each in a process of its own, measured in turns."""

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from effgpu.benching.checks import check, check_commands, read_commands
from effgpu.benching.commits import check_out
from effgpu.benching.result import Bench
from effgpu.benching.side_by_side import SideBySide
from effgpu.benching.training import OverSeeds
from effgpu.comparison import add_control, check_name
from effgpu.measuring import timing
from effgpu.measuring.measurement import check_unit


def bench(
    commands: Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]],
    *,
    refs: Sequence[str] = (),
    seconds: float = 5.0,
    precision: float | None = None,
    skip: int = 5,
    unit: str = "items",
    one_at_a_time: bool = False,
    timeout: float = 300.0,
    energy: bool = True,
    control: bool = False,
    seeds: int | None = None,
    until: int | None = None,
    until_loss: float | None = None,
    name: str = "bench",
    logs: str | Path | None = None,
) -> Bench:
    """Compare training scripts, each run as a command in a process of its own; the first one is the baseline.

    The scripts stay as they are: a step is what lies between two steps of the optimizer that stepped first, or between
    two calls of `effgpu.tick()` where a script makes some. The processes take turns: one runs a few steps, the others
    are frozen, with their DataLoader workers. A command is a line as for a shell, or a list of arguments; a mapping
    gives them labels, which else are the arguments that differ. With `refs`, one command runs in several commits of
    this git repository.

    The bench aims at an interval of ±`precision` (a share; 0.03 on a CPU, 0.01 on a GPU), with at least 15 blocks, and
    at most as many as fit into `seconds` of each command. Where 15 would take much longer, because steps are
    long, there are 8, the fewest that have an interval (more with several commands). `skip` is how
    many steps go first (compilation, warm-up), and `timeout` the longest that a step may take. `one_at_a_time` runs
    each command four times, alone; it is chosen by itself if they do not fit into memory together. `energy` adds a
    window of some seconds per command on a GPU. `control` adds a row: the baseline against its own copy, which shows
    the noise of this machine. The output of the scripts goes to files in the folder `logs`, by default a temporary one.

    A script that fails, hangs or ends early is part of the result, with what was measured before; so is Ctrl-C once a
    turn was measured, though perhaps without a verdict. Raises ValueError or TypeError for arguments that are not as
    expected.

    With `seeds`, each command trains with each seed, which stands for `{seed}` in it, from its start to step `until`,
    or to its own end. The result compares the losses at the end, too, and with `until_loss` the time to that loss: the
    mean loss of ten steps. It is a SeedBench; `seconds`, `precision`, `one_at_a_time` and `energy` are then without
    effect.

    >>> effgpu.bench(["python train.py", "python train.py --bf16"])
    >>> effgpu.bench(["python train.py --seed {seed}", "python train.py --bf16 --seed {seed}"], seeds=5, until=500)
    """
    asked = {"seconds": seconds, "timeout": timeout, "precision": precision, "skip": skip}
    check(commands, refs, **asked, seeds=seeds, until=until, until_loss=until_loss)
    check_name(name)
    check_unit(unit)
    if not hasattr(os, "killpg"):
        raise OSError("effgpu bench needs Linux or macOS: it freezes and ends groups of processes")
    allowed = timing.cap_seconds(seconds)
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(check_out(commands[0], refs)) if refs else read_commands(commands)
        check_commands(read, seeds)
        if control:
            read = add_control(read)
        folder = Path(logs or tempfile.mkdtemp(prefix="effgpu-bench-"))
        folder.mkdir(parents=True, exist_ok=True)
        if seeds:
            run = OverSeeds(read, folder, seeds, until, until_loss, skip, timeout)
        else:
            energy = energy and allowed == seconds
            run = SideBySide(read, folder, allowed, precision, skip, timeout, energy, one_at_a_time)
        stack.callback(run.end)
        try:
            run.measure()
        except KeyboardInterrupt:
            run.interrupted = True
            if not run.has_results():
                raise
    return run.finish(name, unit)
