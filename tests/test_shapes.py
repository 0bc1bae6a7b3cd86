"""Results that are made anew are those of FakeTensorMode."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from effgpu.measuring.torch_internals import FakeTensorMode, TorchDispatchMode
from effgpu.predicting import shapes
from effgpu.predicting.prediction import predict

aten = torch.ops.aten
CALLS = {  # of two tensors of one shape
    "add": lambda a, b: aten.add.Tensor(a, b),
    "add a number": lambda a, b: aten.add.Tensor(a, 2),
    "add a fraction": lambda a, b: aten.add.Tensor(a, 2.0),
    "compare": lambda a, b: aten.lt.Tensor(a, b),
    "cast": lambda a, b: aten._to_copy.default(a, dtype=torch.float16),
    "clone": lambda a, b: aten.clone.default(a, memory_format=torch.contiguous_format),
    "join": lambda a, b: aten.cat.default([a, b], 1),
    "product": lambda a, b: aten.mm.default(a, aten.t.default(b)),
    "transpose": lambda a, b: aten.transpose.int(a, 0, 1),
    "part": lambda a, b: aten.slice.Tensor(a, 1, 1, 3),
    "parts": lambda a, b: aten.unbind.int(a, 1),
    "largest": lambda a, b: aten.topk.default(a, 1),
    "sum": lambda a, b: aten.sum.dim_IntList(a, [0], True),
    "dropout": lambda a, b: aten.native_dropout.default(a, 0.5, True),
    "new": lambda a, b: aten.zeros_like.default(b, dtype=torch.int64),
}


def facts(value):
    """All that a result says of itself."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [facts(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, size


class Through(TorchDispatchMode):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return shapes.run(self.mode, func, args, kwargs or {})


def result_of(call, *given):
    try:
        return facts(call(*given))
    except (RuntimeError, NotImplementedError) as error:
        return type(error)


@given(
    st.sampled_from(list(CALLS)),
    st.integers(1, 5),
    st.integers(3, 5),
    st.sampled_from([torch.float32, torch.float16, torch.float64, torch.int32]),
    st.booleans(),
)
def test_what_is_remembered_is_what_fake_tensor_mode_gives(name, rows, columns, dtype, across):
    with FakeTensorMode() as mode:
        a = torch.empty(columns, rows, dtype=dtype).t() if across else torch.empty(rows, columns, dtype=dtype)
        b = torch.empty_like(a)
        expected = result_of(CALLS[name], a, b)
        with Through(mode):
            found = [result_of(CALLS[name], a, b) for _ in range(2)]  # the second time from memory
    assert found == [expected] * 2


def test_numbers_of_other_types_and_another_default_are_told_apart():
    with FakeTensorMode() as mode:
        a, add = torch.empty(3, dtype=torch.int32), aten.add.Tensor
        found = [shapes.run(mode, add, (a, number), {}).dtype for number in (1, 1.0, True) for _ in range(2)]
        torch.set_default_dtype(torch.float64)
        try:
            found += [shapes.run(mode, add, (a, 1.0), {}).dtype]
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.int32] * 2 + [torch.float32] * 2 + [torch.int32] * 2 + [torch.float64]


def test_a_new_tensor_has_a_storage_of_its_own_and_what_lies_in_an_argument_has_not():
    storage = lambda tensor: tensor.untyped_storage()._cdata
    with FakeTensorMode() as mode:
        a = torch.empty(4, 3)
        for rows in (2, 2, 4, 4):  # parts share a storage, although their schema does not say so
            view, new = shapes.run(mode, aten.t.default, (a,), {}), shapes.run(mode, aten.mm.default, (a, a.t()), {})
            parts = shapes.run(mode, aten.unsafe_split.Tensor, (a, rows), {})
            assert {storage(tensor) for tensor in (view, *parts)} == {storage(a)} != {storage(new)}
        with pytest.raises(TypeError):
            shapes._outline_of_new(torch.empty(4)[:2], mode, set())


def test_what_has_values_is_left_to_fake_tensor_mode():
    """As an optimizer's count of steps: it is known, and grows."""
    with FakeTensorMode() as mode:
        count = torch.tensor(2)
        assert shapes.run(mode, aten.mul.Tensor, (count, count), {}).constant is not None
        shapes.run(mode, aten._foreach_add_.Scalar, ([count], 1), {})
        assert shapes.run(mode, aten._foreach_add_.Scalar, ([torch.empty(3)], 1), {}) is None
    assert count.constant.item() == 3


def test_the_tensors_of_another_mode_are_left_to_it():
    with FakeTensorMode():
        theirs = torch.empty(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ours = shapes.run(mode, aten.t.default, (theirs,), {})
    assert ours.fake_mode is mode and ours.untyped_storage()._cdata != theirs.untyped_storage()._cdata


def variant():
    images = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    convolutions = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(2)
    model = nn.Sequential(*convolutions, nn.Linear(49, 64), nn.TransformerEncoderLayer(64, 2, 128, batch_first=True))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            model(images).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_prediction_is_the_same_without_it(monkeypatch):
    def facts():
        predicted = predict(variant, ["T4", "A100"])
        found = sum((segment.kernels for segment in predicted.segments), Counter())
        assert found
        return [predicted.total(gpu) for gpu in ("T4", "A100")], predicted.owners, predicted.reserved, found

    quick = [facts() for _ in range(2)]  # the second time from memory
    monkeypatch.setattr(shapes, "run", lambda mode, func, args, kwargs: func(*args, **kwargs))
    assert quick == [facts()] * 2
