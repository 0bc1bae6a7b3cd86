"""Tests of what a script computes itself, between its calls of PyTorch."""

import sys

import numpy
import pytest

from effgpu.predicting.own import OwnWork

NUMBERS = numpy.random.default_rng(0).random(300_000)


def step(own, works=True):
    own.enter(__file__)  # as a call of PyTorch's
    numpy.sort(NUMBERS)
    own.leave()
    if works:
        numpy.sort(NUMBERS)
    with own.apart():
        numpy.sort(NUMBERS)
    numpy.sort(NUMBERS), own.enter(__file__, frees=True), own.leave()  # as a graph that is let go of
    own.enter("")
    own.leave()


def train(own, works):
    for number, each in enumerate(works):
        own.next_step((train.__code__, step.__code__))
        own.counts = number > 0
        step(own, each)
    own.next_step((train.__code__, step.__code__))
    found = own.in_each()
    own.end()
    return {line.line - step.__code__.co_firstlineno: seconds for line, seconds in found.items()}


def test_work_is_known_by_its_line_where_each_of_two_steps_does_it():
    before, own = sys.gettrace(), OwnWork()
    if before is not None:
        pytest.skip("there is a trace already")
    ((line, seconds),) = train(own, [True] * 4).items()
    assert line == 5 and seconds > 0.001
    assert sys.gettrace() is None
    assert train(OwnWork(), [True, True, False, True]) == {} == train(OwnWork(), [True, True])


def test_it_leaves_a_debugger_alone():
    before, mine = sys.gettrace(), lambda *_: None
    sys.settrace(mine)
    try:
        assert train(OwnWork(), [True] * 4) == {} and sys.gettrace() is mine
    finally:
        sys.settrace(before)
