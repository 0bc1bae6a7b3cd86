"""Results that are made anew are those of FakeTensorMode."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from effgpu.measuring.torch_internals import FakeTensorMode
from effgpu.predicting import shapes
from effgpu.predicting.predict import predict

aten = torch.ops.aten
CALLS = [  # with two tensors of one shape
    lambda run, a, b: run(aten.add.Tensor, a, b),
    lambda run, a, b: run(aten.add.Tensor, a, 2.0),
    lambda run, a, b: run(aten.lt.Tensor, a, b),
    lambda run, a, b: run(aten._to_copy.default, a, dtype=torch.float16),
    lambda run, a, b: run(aten.clone.default, a, memory_format=torch.contiguous_format),
    lambda run, a, b: run(aten.cat.default, [a, b], 1),
    lambda run, a, b: run(aten.mm.default, a, run(aten.t.default, b)),
    lambda run, a, b: run(aten.slice.Tensor, a, 1, 1, 3),
    lambda run, a, b: run(aten.unbind.int, a, 1),
    lambda run, a, b: run(aten.topk.default, a, 1),
    lambda run, a, b: run(aten.native_dropout.default, a, 0.5, True),
    lambda run, a, b: run(aten._unsafe_view.default, b.contiguous(), [-1]),
    lambda run, a, b: run(aten.add_.Tensor, b, a),
    lambda run, a, b: run(aten.mul_.Tensor, b, 0.5),
    lambda run, a, b: run(aten.add_.Tensor, b, torch.empty(9, 9)),
    lambda run, a, b: run(aten.t_.default, b),
    lambda run, a, b: run(aten.resize_.default, b, [7, 7]),
]


def facts(value):
    """All that a result says of itself."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [facts(each) for each in value]
    size = value.untyped_storage().nbytes()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, size


@given(
    st.sampled_from(CALLS),
    st.integers(1, 5),
    st.integers(3, 5),
    st.sampled_from([torch.float32, torch.float16, torch.int32]),
    st.booleans(),
)
def test_what_is_remembered_is_what_fake_tensor_mode_gives(call, rows, columns, dtype, across):
    with FakeTensorMode() as mode:
        a = torch.empty(columns, rows, dtype=dtype).t() if across else torch.empty(rows, columns, dtype=dtype)

        def result_with(run):
            try:
                return facts(call(run, a, torch.empty_like(a)))
            except RuntimeError as error:
                return type(error)

        expected = result_with(lambda func, *args, **options: func(*args, **options))
        run = lambda func, *args, **options: shapes.run(mode, func, args, options)
        assert [result_with(run) for _ in range(2)] == [expected] * 2  # the second time from memory


def test_what_changes_a_tensor_gives_that_tensor_and_a_view_its_storage():
    with FakeTensorMode() as mode:
        for _ in range(2):
            a, b = torch.empty(2, 3), torch.empty(2, 3)
            assert shapes.run(mode, aten.add_.Tensor, (a, b), {"alpha": 2}) is a
            viewed = shapes.run(mode, aten._unsafe_view.default, (a, [6]), {})
            assert viewed.shape == (6,) and viewed.untyped_storage()._cdata == a.untyped_storage()._cdata


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
