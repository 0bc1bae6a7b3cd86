"""Tests of effgpu.measuring.turns: whose turn it is, for how many blocks, and what is promised meanwhile."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from effgpu.measuring import turns
from effgpu.measuring.turns import take_blocks, take_builds


class Simulated:
    """Labels that take turns of 10 ms each, with noise, and what was said before each."""

    def __init__(self, monkeypatch, sigma=0.0, labels="ab"):
        self.now, self.sigma = 0.0, sigma
        self.order, self.said, self.logs = "", [], {label: [] for label in labels}
        self.noise = {label: random.Random(label) for label in labels}  # whatever the order of turns
        monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def alive(self):
        return list(self.logs)

    def take_turn(self, label):
        self.order += label
        self.logs[label].append(self.noise[label].gauss(0, self.sigma))
        self.now += 0.01

    def ratios(self):
        first, *others = self.logs.values()
        return [[(ours - theirs) / 2 for ours, theirs in zip(other, first)] for other in others]

    def say(self, done, total, left):
        self.said.append((self.now, done, total, left))

    def run(self, **options):
        options = {"target": 0.03, "seconds": 1e9} | options
        take_blocks(self.alive, self.take_turn, self.ratios, say=self.say, **options)
        return len(self.order) // (2 * len(self.logs))


def test_each_block_is_an_order_and_its_reverse_drawn_at_random_but_not_by_the_readers_generator(monkeypatch):
    simulated, state = Simulated(monkeypatch, labels="abc"), random.getstate()
    assert simulated.run(blocks=600) == 600 and random.getstate() == state
    blocks = Counter(simulated.order[i : i + 6] for i in range(0, 3600, 6))
    assert set(blocks) == {"abccba", "acbbca", "baccab", "bcaacb", "cabbac", "cbaabc"}
    assert min(blocks.values()) > 60, "each about a hundred times"


@pytest.mark.parametrize(
    ("sigma", "options", "blocks"),
    [
        pytest.param(0.0, {}, 15, id="quiet"),
        pytest.param(0.05, {}, 17, id="noisy"),
        pytest.param(0.05, {"target": 0.02}, 38, id="a finer target"),
        pytest.param(1.0, {}, 80, id="at most 80"),
        pytest.param(1.0, {"seconds": 0.0201 * 30}, 30, id="limited"),
        pytest.param(1.0, {"seconds": 0.001}, 15, id="no less than 15"),
        pytest.param(1.0, {"seconds": 0.001, "fewest": 8}, 15, id="15, as they take no long time"),
        pytest.param(0.05, {"fewest": 8}, 17, id="noisy, from 8 on"),
        pytest.param(0.05, {"confidence": 0.999}, 32, id="noisy, with more confidence"),
        pytest.param(1.0, {"blocks": 20}, 20, id="given"),
        pytest.param(0.0, {"blocks": 100}, 100, id="many given"),
        pytest.param(1.0, {"capped": True, "seconds": 0.0201 * 3}, 3, id="capped"),
        pytest.param(1.0, {"capped": True, "seconds": 0.001}, 1, id="capped, at least 1"),
        pytest.param(1.0, {"capped": True, "seconds": 0.0201 * 30}, 15, id="capped, at most 15"),
    ],
)
def test_there_are_as_many_blocks_as_the_noise_asks_for_and_the_seconds_allow(sigma, options, blocks, monkeypatch):
    assert Simulated(monkeypatch, sigma=sigma).run(**options) == blocks


def test_long_turns_are_taken_in_the_fewest_blocks(monkeypatch):
    monkeypatch.setattr(turns, "_NO_LONG_WAIT", 0.1)
    assert Simulated(monkeypatch).run(seconds=0.0201 * 9, fewest=8) == 8
    assert Simulated(monkeypatch).run(seconds=0.0201 * 9) == 15
    assert Simulated(monkeypatch).run(seconds=0.0201 * 11, fewest=8) == 15, "one and a half times that is enough"


def test_what_fails_has_no_more_turns_and_none_are_taken_where_all_fail(monkeypatch):
    simulated = Simulated(monkeypatch)
    simulated.ratios = list
    simulated.alive = lambda: {0: ["a", "b"], 1: ["a"]}.get(len(simulated.order) // 10, [])
    simulated.run()
    assert len(simulated.order) in (20, 21) and "b" not in simulated.order[12:], "a block that has begun goes on"


@pytest.mark.parametrize("sigma", [0.0, 0.03, 1.0])
def test_what_is_promised_is_never_ten_times_too_much(sigma, monkeypatch):
    simulated = Simulated(monkeypatch, sigma=sigma)
    simulated.run()
    assert simulated.said[0][1:] == (0, 60, None), "nothing is known, and nothing is promised"
    for now, done, total, left in simulated.said[1:]:
        assert done < total
        assert left <= 10 * (simulated.now - now)
        if done >= 60:
            assert left == pytest.approx(simulated.now - now), "the number of blocks is known"


def test_builds_take_four_rounds_in_which_each_has_its_turn(monkeypatch):
    simulated = Simulated(monkeypatch, labels="abc")
    take_builds(simulated.alive, simulated.take_turn, simulated.say)
    rounds = [simulated.order[i : i + 3] for i in range(0, 12, 3)]
    assert len(simulated.order) == 12 and all(sorted(one) == list("abc") for one in rounds)
    assert [(done, total) for _, done, total, _ in simulated.said] == [(n, 12) for n in range(12)]
    assert [left for *_, left in simulated.said] == [None, *(pytest.approx(0.01 * (12 - n)) for n in range(1, 12))]
