"""Tests of effgpu.course.ranks, on one rank of a group of two that sends nothing. Lesson 20 takes two real ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from effgpu.course import ranks
from effgpu.course.ranks import bytes_held, bytes_sent, take_turns


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_bytes_sent_counts_the_rounds_of_each_collective_operation():
    whole, own = torch.zeros(1000), torch.zeros(500)
    assert bytes_sent(lambda: dist.all_reduce(whole)) == 2 * 4000 / 2
    assert bytes_sent(lambda: dist.all_gather_into_tensor(whole, own)) == 4000 / 2
    assert bytes_sent(lambda: dist.reduce_scatter_tensor(own, whole)) == 4000 / 2
    assert bytes_sent(lambda: [dist.all_reduce(own), dist.all_reduce(own)]) == 2 * 2 * 2000 / 2
    assert bytes_sent(lambda: whole.sum()) == 0


def test_bytes_held_are_those_of_weights_gradients_and_state():
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert bytes_held(model, optimizer) == [440, 440, 880]


def test_steps_take_turns_forwards_and_backwards_and_the_first_round_is_the_warm_up(monkeypatch):
    called = []

    def time_steps(step, count):
        step()
        return [len(called)] * count

    monkeypatch.setattr(ranks, "time_steps", time_steps)
    turns = take_turns({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=2)
    assert called == ["a", "b", "b", "a"] * 3
    assert turns == {"a": [(5, 8), (9, 12)], "b": [(6, 7), (10, 11)]}
