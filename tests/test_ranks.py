"""Tests of effgpu.course.ranks: of torchrun on two real ranks, else on one of a group of two that sends nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from effgpu.course import ranks
from effgpu.course.ranks import bytes_sent, take_turns, torchrun


@pytest.fixture
def group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_torchrun_returns_what_both_ranks_print(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
told = [os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"]]
sys.stdout.write("|".join(told) + "\\n")  # in one piece, or the ranks' lines may mix
""")
    assert sorted(torchrun(str(script), "a b", cpu=True).split("\n")) == ["", "0|2|a b|", "1|2|a b|"]


def test_a_rank_that_fails_is_an_error_with_its_last_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; assert os.environ['RANK'] == '0', 'not the first rank'")
    with pytest.raises(RuntimeError, match=r"(?s)script.py: expected both ranks to end well.*not the first rank"):
        torchrun(str(script))


@pytest.mark.parametrize("aborts", [1, 2])
def test_ranks_that_abort_at_their_end_run_once_more(aborts, tmp_path):
    script = tmp_path / "train.py"
    told = "terminate called without an active exception"
    script.write_text(
        f"""
import os, pathlib, sys
if os.environ["RANK"] == "0":
    runs = pathlib.Path({str(tmp_path / "runs")!r})
    runs.write_text("x" + (runs.read_text() if runs.exists() else ""))
    if len(runs.read_text()) <= {aborts}:
        sys.exit({told!r})
    print("well")
"""
    )
    if aborts == 1:
        assert torchrun(str(script)) == "well\n"
    else:
        with pytest.raises(RuntimeError, match=told):
            torchrun(str(script))
    assert len((tmp_path / "runs").read_text()) == 2


@pytest.mark.usefixtures("group")
def test_bytes_sent_counts_the_rounds_of_each_collective_operation():
    whole, own = torch.zeros(1000), torch.zeros(500)
    assert bytes_sent(lambda: dist.all_reduce(whole)) == 2 * 4000 / 2
    assert bytes_sent(lambda: dist.all_gather_into_tensor(whole, own)) == 4000 / 2
    assert bytes_sent(lambda: dist.reduce_scatter_tensor(own, whole)) == 4000 / 2
    assert bytes_sent(lambda: [dist.all_reduce(own), dist.all_reduce(own)]) == 2 * 2 * 2000 / 2
    assert bytes_sent(lambda: whole.sum()) == 0


@pytest.mark.usefixtures("group")
def test_steps_take_turns_forwards_and_backwards_and_the_first_round_is_the_warm_up(monkeypatch):
    called = []
    time_steps = lambda step, count: [step() or len(called)] * count
    monkeypatch.setattr(ranks, "time_steps", time_steps)
    turns = take_turns({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=2)
    assert called == ["a", "b", "b", "a"] * 3
    assert turns == {"a": [(5, 8), (9, 12)], "b": [(6, 7), (10, 11)]}
