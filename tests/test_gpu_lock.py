"""Tests of effgpu.gpu_lock. How lessons take turns with it is tested in test_runner.py, in real kernels."""

import fcntl

import pytest

from effgpu.measuring import gpu_lock


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The lock of this process, taken; `is_free` says whether another process could take it."""
    lock = gpu_lock._Lock(tmp_path / "gpu")
    monkeypatch.setattr(gpu_lock, "_lock", lock)
    lock.take()
    return lock


def is_free(lock, tmp_path) -> bool:
    with open(tmp_path / "gpu") as file:  # opened anew, as in another process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_it_is_free_inside_of_free_and_taken_inside_of_taken_whatever_happens(lock, tmp_path):
    free = lambda: is_free(lock, tmp_path)
    assert not free()
    with pytest.raises(ZeroDivisionError), gpu_lock.free():
        assert free()
        with gpu_lock.free(), gpu_lock.taken():
            assert not free()
            with gpu_lock.taken():
                assert not free()
            assert not free()
        assert free()
        1 / 0  # noqa: B018
    assert not free()
    lock.give_back()
    with gpu_lock.free():
        assert free()
    assert free(), "what was not taken is not taken afterwards"


def test_it_is_free_while_compiling_also_after_a_reset(lock, tmp_path):
    import torch._dynamo

    seen = []

    def backend(graph, inputs):
        seen.append(is_free(lock, tmp_path))
        return graph.forward

    for expected in (False, True, True):
        torch.compiler.reset()
        if expected:
            gpu_lock.free_while_compiling()
            gpu_lock.free_while_compiling()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        assert seen.pop() == expected and not is_free(lock, tmp_path)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\n\ndef step():\n    model(texts).sum().backward()", False),
        ("guess = 2.0  # @param", False),
        ("print(f'{guess} faster')\nresult", False),
        ("effgpu.plot(result)", False),
        ("for gpu in ('T4',):\n    print(effgpu.predict(partial(variant, batch=2), gpu).time().expected)", False),
        ("effgpu.plot({'a': effgpu.trace(variant)})", True),
        ("step()", True),
        ("print(loss.item())", True),
        ("%pip install torch", True),
    ],
)
def test_only_a_cell_that_may_use_the_gpu_waits_for_it(source, expected):
    assert gpu_lock.may_use_gpu(source) == expected


def test_without_a_lock_nothing_is_locked(monkeypatch):
    monkeypatch.setattr(gpu_lock, "_lock", None)
    with gpu_lock.free(), gpu_lock.taken():
        gpu_lock.free_while_compiling()
    monkeypatch.delenv(gpu_lock.VARIABLE, raising=False)
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    with pytest.raises(KeyError, match=gpu_lock.VARIABLE):
        gpu_lock.hold_in_cells()
