"""`effgpu bench --seeds`: simulated trainings whose truth is known, and the statistics of their losses."""

import json
import math
import random
import re
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import effgpu
from effgpu import results
from effgpu.__main__ import main
from effgpu.attaching.commands import Command
from effgpu.benching import training
from effgpu.benching.losses import HIGHER, LOWER, at_the_end, count_seeds, find_change, reached
from effgpu.benching.seeds import Run, SeedBench
from effgpu.benching.training import OverSeeds, _Followed
from effgpu.measuring.intervals import divide_confidence, quantile_of_student
from effgpu.verdicts import SAME

# A training of which the truth is known: with each seed its loss falls to an end of its own, times a factor.
SCRIPT = """
import argparse, math, random, sys, time
import effgpu
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--factor", type=float, default=1.0)
parser.add_argument("--sleep", type=float, default=0.001)
parser.add_argument("--steps", type=int, default=10**9)
args = parser.parse_args()
seed = args.seed
end = 2 * args.factor * math.exp(random.Random(seed).gauss(0, 0.05) + random.Random(str(args)).gauss(0, 0.001))
{before}
for step in range(1, args.steps + 1):
    time.sleep(args.sleep)
    loss = end * (1 + math.exp(-step / 5))
    {inside}
    effgpu.tick(loss=loss{tick})
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def script(name="train", before="", inside="", tick=""):
    Path(f"{name}.py").write_text(SCRIPT.format(before=before, inside=inside, tick=tick))
    return f"{sys.executable} {name}.py --seed {{seed}}"


def bench(*commands, **options):
    return effgpu.bench(commands, **{"seeds": 3, "until": 40, "skip": 1, "timeout": 20.0, "logs": "logs"} | options)


# The whole command


def test_speed_and_loss_stand_in_one_table(capsys):
    plain, out = script(tick=", metric=0.9 if step % 20 == 0 else None"), Path("r.json")
    other = f"{plain} --factor 0.9 --sleep 0.01"
    asked = ["--seeds", "4", "--until", "40", "--until-loss", "2.5", "--skip", "1", "--plot", "p.png"]
    assert main(["bench", *asked, plain, other, "--json", str(out)]) == 0
    printed, said = capsys.readouterr()
    (result,) = results.load(out)
    assert isinstance(result, SeedBench) and repr(result) + "\n" == printed
    label = "--factor 0.9 --sleep 0.01"
    assert result.verdict(label) == "slower" and result.tell_end(label, "loss").startswith("lower: −10")
    change = result.change(label, "loss")
    assert change.verdict == LOWER and change.low < -0.1 < change.high and change.high - change.low < 0.03
    assert result.tell_end(label, "metric") == "same (within 1 %)" and result.end(label, "metric") == 0.9
    assert result.time_to_loss(label).value > 1
    assert all(run.steps == 40 and len(run.curve) == 40 for runs in result.runs.values() for run in runs)
    assert result.baseline.median == pytest.approx(0.0015, abs=0.0012) and result.baseline.builds == 4
    assert re.match(r"effgpu: 8 trainings of 40 steps, .*\neffgpu: the first took .*: about .* for the others\n", said)
    assert Path("p.png").stat().st_size and Path("p-losses.png").stat().st_size
    stored = json.loads(out.read_text())["comparisons"][0]["bench"]["verdicts"][label]
    assert (
        stored["loss"]["verdict"] == "lower" and stored["verdict"] == "slower" and stored["time_to_loss"]["ratio"] > 1
    )


def test_the_same_digits_and_what_a_script_says_at_its_own_end():
    command = f"{script()} --steps 30"
    result = bench(command, command, until=None)
    label = result.measurements[1].label
    assert result.tell_end(label, "loss") == "same, digit for digit" and result.notes == ()
    assert {run.steps for runs in result.runs.values() for run in runs} == {30}, "the last steps are reported, too"
    assert "to their ends" in result.how_timed()


def test_seeds_that_change_nothing_are_said_and_end_it(capsys):
    ignored = script(before="end = 2.0")
    assert main(["bench", "--seeds", "5", "--until", "20", "--skip", "1", ignored, f"{ignored} --factor 0.5"]) == 4
    printed = capsys.readouterr().out
    assert "the seeds change nothing" in printed and "does it use {seed}?" in printed
    assert Path("seen").exists() is False and printed.count("does it use") == 2


def test_a_loss_that_is_nan_is_a_result():
    plain = script()
    diverges = script("diverges", inside="loss = math.nan if seed == 1 and step > 30 else loss")
    result = bench(plain, diverges, script("ruined", inside="loss = math.nan"))
    assert result.tell_end("diverges.py", "loss") == "not finite in 1 of 3 seeds"
    assert result.tell_end("ruined.py", "loss") == "not finite in 3 of 3 seeds" and not result.seeds_change_nothing
    assert "interval, for all of a column together." in result.caption()
    assert len(result.kept("diverges.py")) == 3 and result.change("diverges.py", "loss") is None
    back = SeedBench.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert math.isnan(back.runs["diverges.py"][1].loss) and repr(back) == repr(result)
    turned = bench(diverges, plain)
    assert turned.tell_end("train.py", "loss") == "not finite in 1 of 3 seeds of the baseline"


def test_a_seed_that_fails_is_named_and_left_out_of_both():
    failing = script("fails", inside="1 / 0 if seed == 1 and step > 5 else 0")
    result = bench(script(), failing, seeds=4)
    assert [run.seed for run in result.kept("train.py")] == [run.seed for run in result.kept("fails.py")] == [0, 2, 3]
    assert len(result["train.py"].turns) == 3 and result.change("fails.py", "loss").verdict in (SAME, "inconclusive")
    (note,) = [note for note in result.notes if "seed 1" in note]
    assert note.startswith("fails.py, seed 1: left out of all commands, as it failed after step")
    assert "ZeroDivisionError" in note


def test_a_command_that_fails_with_two_seeds_is_given_up():
    result = bench(script(), script("fails", before="raise SystemExit(3)"), seeds=5, until_loss=2.5)
    headings, (_, row) = result.table()
    cells = dict(zip(headings, row))
    assert cells["time to loss 2.5"] == "failed before its first step" and cells["seeds"] == "failed with 2 of 2"
    assert result.verdict("fails.py") == "failed before its first step" and len(result.runs["fails.py"]) == 2
    short = bench(script(), f"{script('short')} --steps 20", seeds=5)
    assert short.verdict("short.py --steps 20") == "ended after step 20" and len(short.runs["train.py"]) == 2


def test_ctrl_c_shows_the_seeds_with_which_all_had_trained(monkeypatch):
    plain, trained = script(), []

    def train(self, label, seed):
        if len(trained) == 5:
            raise KeyboardInterrupt
        trained.append(label)
        return train_for_real(self, label, seed)

    train_for_real = OverSeeds._train
    monkeypatch.setattr(OverSeeds, "_train", train)
    result = bench(plain, f"{plain} --factor 0.9", seeds=5)
    assert result.interrupted and [len(result.kept(m.label)) for m in result] == [2, 2]
    assert "Interrupted" in result.notes[-1] and "seeds" in result.table()[0]


AS_IT_IS = """
import sys, torch
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for _ in range(60):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_script_without_a_tick_trains_to_its_own_end():
    Path("train.py").write_text(AS_IT_IS)
    command = f"{sys.executable} train.py {{seed}}"
    result = bench(f"{command} 0.1", f"{command} 0", seeds=2, until=None, timeout=60.0)
    assert {run.steps for runs in result.runs.values() for run in runs} == {60}
    label = result.measurements[1].label
    assert set(result.sources.values()) == {"SGD"} and result.end(label, "loss") > 1.2 * result.end(
        result.baseline.label, "loss"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seeds", "3", "true train.py"], "expected {seed} in it, as in --seed {seed}"),
        (["true train.py --seed {seed}"], "expected seeds with {seed}"),
        (["--seeds", "1", "true {seed}"], "seeds: expected a whole number from 2 on, got 1"),
        (["--until", "9", "true"], "expected seeds with them"),
        (["--seeds", "3", "--until", "5", "true {seed}"], "until: expected a step from 7 on"),
        (["--seeds", "3", "--until-loss", "nan", "true {seed}"], "until_loss: expected a number"),
    ],
)
def test_what_cannot_be_trained_over_seeds_is_refused_in_one_line(arguments, told, capsys):
    assert main(["bench", *arguments]) == 2
    answer = capsys.readouterr().err
    assert answer.startswith("effgpu: error: ") and answer.count("\n") == 1 and told in answer


# The statistics


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("spread", [0.005, 0.05])
def test_false_verdicts_are_rarer_than_one_in_a_hundred(seeds, spread):
    generator, wrong = random.Random(f"{seeds} {spread}"), 0
    for _ in range(count := 3000):
        ours = [math.exp(generator.gauss(0, spread)) for _ in range(seeds)]
        wrong += find_change(ours, [1.0] * seeds).verdict in (LOWER, HIGHER)
    assert wrong <= 0.01 * count + 3 * math.sqrt(0.01 * count)


@pytest.mark.parametrize("spread", [0.002, 0.005, 0.01])
def test_as_many_seeds_as_are_asked_for_show_the_difference(spread):
    """In 9 of 10 cases the interval excludes 0, as is promised."""
    generator, seeds = random.Random(str(spread)), count_seeds(spread, 0.01)
    found = 0
    for _ in range(count := 1000):
        change = find_change([math.exp(generator.gauss(-0.01, spread)) for _ in range(seeds)], [1.0] * seeds)
        found += change.high < 0
    assert found / count == pytest.approx(0.9, abs=0.06) or found / count > 0.9


def test_so_many_seeds_are_the_fewest_and_more_than_a_thousand_are_not_counted():
    errors = lambda seeds: quantile_of_student(seeds - 1) + quantile_of_student(seeds - 1, 0.8)
    for spread in (0.001, 0.01, 0.05, 0.08):
        seeds = count_seeds(spread, 0.01)
        assert errors(seeds) * spread / math.sqrt(seeds) <= 0.01
        assert seeds == 2 or errors(seeds - 1) * spread / math.sqrt(seeds - 1) > 0.01
    assert count_seeds(0.01, 0.01, 0.999) > count_seeds(0.01, 0.01) > count_seeds(0.01, 0.02)
    assert count_seeds(10.0, 0.01) is None


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=9), st.floats(0.5, 2))
def test_a_factor_is_found_as_such_and_the_digits_decide_the_words(theirs, factor):
    change = find_change([factor * value for value in theirs], theirs)
    assert change.value == pytest.approx(factor - 1, abs=1e-9)
    expected = SAME if abs(factor - 1) < 0.0099 else LOWER if factor < 0.985 else HIGHER if factor > 1.015 else None
    assert expected is None or change.verdict == expected


def test_a_change_in_words():
    assert str(find_change([0.9, 0.91, 0.89], [1.0, 1.0, 1.0])).startswith("lower: −10.0 % [−15.")
    assert str(find_change([1.02, 1.0, 1.03], [1.0, 1.0, 1.0])).startswith("inconclusive (±")
    assert str(find_change([1.0, 1.001, 1.0], [1.0, 1.0, 1.0])) == "same (within 1 %)"
    metric = find_change([0.8, 0.82, 0.81], [0.9, 0.92, 0.91], ratios=False)
    assert metric.value == pytest.approx(-0.1 / 0.91) and metric.verdict == LOWER
    assert find_change([-1.2, -1.21], [-1.0, -1.01]).value == pytest.approx(-0.2 / 1.005), "no logarithms below 0"
    assert find_change([1.0], [1.0]) is None
    for comparisons in (1, 9):  # of one, the width has 45 digits; of nine, no number holds it
        noisy = find_change([0.001, 5.0], [0.02, 4.0], divide_confidence(comparisons))
        assert str(noisy) == "inconclusive (too noisy, above ±100 %)" and math.isfinite(noisy.high)


def test_the_loss_at_the_end_and_the_time_to_one():
    losses = {step: 100 / step for step in range(1, 101)}
    assert at_the_end(losses, 100) == pytest.approx(statistics.fmean(100 / step for step in range(91, 101)))
    assert at_the_end({20: 0.5, 60: 0.7}, 100) == 0.7 and at_the_end({}, 100) is None
    seconds = {step: step / 10 for step in losses}
    first = next(step for step in range(10, 101) if statistics.fmean(100 / s for s in range(step - 9, step + 1)) <= 2)
    assert reached(losses, seconds, 2.0) == pytest.approx(first / 10) and reached(losses, seconds, 0.5) is None


def test_reports_are_put_together_and_what_tick_says_goes_first():
    followed = _Followed()
    report = {"source": "SGD", "step": 3, "losses": [(3, 9.0)], "metrics": [], "stamps": [1.0, 2.0], "peak": 5}
    followed.note(report, 0.5)
    assert followed.seconds == {2: 0.5, 3: 1.5} and followed.losses == {3: 9.0}
    ticks = [(step, 1.0) for step in range(1, 21)]
    followed.note({**report, "source": "effgpu.tick", "step": 20, "losses": ticks, "stamps": list(range(20))}, 0.0)
    run = followed.finish(7, 10, 2, None)
    assert run == Run(7, 10, 1.0, 1.0, None, None, run.curve, run.digits, 5) and len(run.curve) == 10


def test_a_seed_stands_in_arguments_and_variables():
    command = training.with_seed(Command(("a", "--seed={seed}", "{seed}x"), {"SEED": "{seed}"}), 3)
    assert command == Command(("a", "--seed=3", "3x"), {"SEED": "3"})
