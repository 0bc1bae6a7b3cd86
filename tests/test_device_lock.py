"""Tests of effgpu.device_lock. How lessons take turns with it is tested in test_runner.py, in real kernels."""

import fcntl

import pytest
import torch

from effgpu.measuring import device_lock
from effgpu.measuring.torch_internals import callback_handler


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The lock of this process, taken; `is_free` says whether another process could take it."""
    lock = device_lock._Lock(tmp_path / "gpu")
    monkeypatch.setattr(device_lock, "_lock", lock)
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
    with pytest.raises(ZeroDivisionError), device_lock.free():
        assert free()
        with device_lock.free(), device_lock.taken():
            assert not free()
            with device_lock.taken():
                assert not free()
            assert not free()
        assert free()
        1 / 0  # noqa: B018
    assert not free()
    lock.give_back()
    with device_lock.free():
        assert free()
    assert free(), "what was not taken is not taken afterwards"


def test_it_is_free_while_compiling_also_after_a_reset(lock, tmp_path):
    seen = []

    def backend(graph, inputs):
        seen.append(is_free(lock, tmp_path))
        return graph.forward

    for expected in (False, True, True):
        torch.compiler.reset()
        if expected:
            device_lock.free_while_compiling()
            device_lock.free_while_compiling()
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
    assert device_lock.may_use_gpu(source) == expected


def test_without_a_lock_nothing_is_locked(monkeypatch):
    monkeypatch.setattr(device_lock, "_lock", None)
    with device_lock.free(), device_lock.taken():
        device_lock.free_while_compiling()
    monkeypatch.delenv(device_lock.VARIABLE, raising=False)
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    with pytest.raises(KeyError, match=device_lock.VARIABLE):
        device_lock.hold_in_cells()


def test_on_a_cpu_it_is_free_only_for_what_stands_aside_and_not_while_compiling(lock, tmp_path):
    lock.on_cpu = True
    with device_lock.free():
        assert not is_free(lock, tmp_path)
    with device_lock.free(stands_aside=True):
        assert is_free(lock, tmp_path)
        device_lock.stand_aside()  # nobody else holds it
        assert is_free(lock, tmp_path)
    assert not is_free(lock, tmp_path)
    torch.compiler.reset()
    device_lock.free_while_compiling()
    assert lock.give_back not in callback_handler.start_callbacks
