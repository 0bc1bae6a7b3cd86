"""nn.LSTM, nn.GRU and nn.RNN as a GPU runs them: one call of cuDNN, where a CPU takes them apart."""

import functools
from collections.abc import Callable, Iterator

import torch

from effgpu.predicting.kernels import format_of_recurrent, touching
from effgpu.predicting.kinds import OTHER, PRODUCT, Kernel

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# Numbers that cuDNN keeps for the backward pass for each token, layer and number of the hidden state: the gates, the
# cell's state and its tanh, the layer's output; of a GRU also the part of the candidate that a gate multiplies. cuDNN
# does not publish its reserve: this is what the formulas need.
KEPT = {"lstm": 7, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
STATES, WORKSPACE = {"lstm": 2, "gru": 1}, {"lstm": 4, "gru": 5}  # of a cell, and what it keeps, by its hidden state


def kernels(kind: str, tokens: int, steps: int, sizes: list[tuple[int, int, int]], like: torch.Tensor) -> Iterator:
    """(kernel, how often it runs) of a forward pass: a product for all inputs of a layer, then one for each step.

    `sizes` has the inputs, the hidden state and the output of each layer and direction. cuDNN's developer guide says so
    of its standard algorithm; FLOPs as in Appleyard et al. 2016, Optimizing performance of recurrent neural networks.
    """
    for inputs, hidden, output in sizes:
        width = GATES[kind] * hidden
        yield _product(f"{kind} (inputs)", tokens, width, inputs, like), 1
        yield from _steps(kind, tokens, steps, width, output, like)
        if output < hidden:  # a projection
            yield _product(f"{kind} (projection)", max(1, tokens // steps), output, hidden, like), steps


def backward_kernels(kind: str, tokens: int, steps: int, sizes: list, like: torch.Tensor) -> Iterator:
    """(kernel, how often it runs) of a backward pass: twice the FLOPs, for inputs and states, and for the weights."""
    for inputs, hidden, output in sizes:
        width = GATES[kind] * hidden
        yield from _steps(f"{kind} backward", tokens, steps, output, width, like)
        yield _product(f"{kind} backward (inputs)", tokens, inputs, width, like), 1
        yield _product(f"{kind} backward (weights)", width, inputs + output, tokens, like), 1
        if output < hidden:
            yield _product(f"{kind} backward (projection)", max(1, tokens // steps), hidden, output, like), steps
            yield _product(f"{kind} backward (projection's weights)", output, hidden, tokens, like), 1


def _steps(kind: str, tokens: int, steps: int, columns: int, depth: int, like: torch.Tensor) -> Iterator:
    rows, size = max(1, tokens // steps), like.element_size()
    yield _product(f"{kind} (step)", rows, columns, depth, like), steps
    moved = 2 * rows * (columns + depth) * size
    yield Kernel(f"{kind} (gates)", OTHER, format_of_recurrent(like), 0, moved), steps


def _product(name: str, rows: int, columns: int, depth: int, like: torch.Tensor) -> Kernel:
    moved = (rows * columns + rows * depth + columns * depth) * like.element_size()
    even = columns * like.element_size() % 16 == depth * like.element_size() % 16 == 0
    product = 1, rows, columns, depth
    return Kernel(name, PRODUCT, format_of_recurrent(like), 2 * rows * columns * depth, moved, 1, product, even)


class _Layers(torch.autograd.Function):
    """The layers as one operation: what it gives, what it keeps, and gradients of its inputs and weights."""

    @staticmethod
    def forward(ctx, note, kind, shape, weights_per_layer, inputs, *states_and_weights):
        """`shape` is (tokens, steps, the output's shape, how many states, is the batch first, is it trained)."""
        tokens, steps, output_shape, states, ctx.turned, is_trained = shape
        ordered = _in_order(inputs, ctx.turned)
        weights = states_and_weights[states:]
        first = [weights[i : i + 2] for i in range(0, len(weights), weights_per_layer)]
        sizes = [(ours.shape[1], ours.shape[0] // GATES[kind], theirs.shape[1]) for ours, theirs in first]
        note(kernels(kind, tokens, steps, sizes, inputs))
        ctx.note = lambda inputs: note(backward_kernels(kind, tokens, steps, sizes, inputs))
        kept = tokens * sum(KEPT[kind] * hidden for _, hidden, _ in sizes)
        reserve = inputs.new_empty(kept) if is_trained else None  # which the backward pass frees, as all that is saved
        output = _empty(ordered, output_shape, ctx.turned)
        ctx.save_for_backward(reserve, inputs, output, *states_and_weights)
        return output, *(torch.empty_like(state) for state in states_and_weights[:states])

    @staticmethod
    def backward(ctx, *grads):
        _, inputs, _, *others = ctx.saved_tensors
        given = _in_order(inputs, ctx.turned), _in_order(grads[0], ctx.turned)
        ctx.note(inputs)
        wanted, *others_wanted = ctx.needs_input_grad[4:]
        made = _empty(inputs, inputs.shape, ctx.turned) if wanted else None
        del given
        again = _in_order(inputs, ctx.turned)  # _cudnn_rnn_backward_weight is a call of its own
        others_made = [torch.empty_like(each) if on else None for each, on in zip(others, others_wanted)]
        del again
        return None, None, None, None, made, *others_made


def _in_order(tensor: torch.Tensor, turned: bool) -> torch.Tensor:
    """cudnn/RNN.cpp, _cudnn_rnn: what lies one step of time after the other; a copy, where it does not."""
    return (tensor.transpose(0, 1) if turned else tensor).contiguous()


def _empty(like: torch.Tensor, shape: torch.Size, turned: bool) -> torch.Tensor:
    """What cuDNN writes, step by step, whatever comes first in its shape."""
    if not turned:
        return like.new_empty(shape)
    rows, _, width = shape
    return like.new_empty_strided(shape, (width, rows * width, 1))


def run_padded(note, kind: str, inputs, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first):
    """aten::lstm.input and the like: inputs of (time, batch, features), or batch first."""
    states = list(hx) if kind == "lstm" else [hx]
    tokens, steps = inputs.shape[0] * inputs.shape[1], inputs.shape[1 if batch_first else 0]
    directions = 2 if bidirectional else 1
    shape = tokens, steps, (*inputs.shape[:2], directions * states[0].shape[-1]), len(states), batch_first
    return _run(note, kind, shape, len(params) // (layers * directions), inputs, states, params)


def run_packed(note, kind: str, data, batch_sizes, hx, params, has_biases, layers, dropout, train, bidirectional):
    """aten::lstm.data and the like: a packed sequence, whose number of steps is the length of `batch_sizes`."""
    states = list(hx) if kind == "lstm" else [hx]
    directions = 2 if bidirectional else 1
    shape = data.shape[0], batch_sizes.shape[0], (data.shape[0], directions * states[0].shape[-1]), len(states), False
    note = functools.partial(note, packed=True)
    return _run(note, kind, shape, len(params) // (layers * directions), data, states, params)


class _Cell(torch.autograd.Function):
    """One step's gates as one operation, after two products: aten/src/ATen/native/cuda/RNN.cu."""

    @staticmethod
    def forward(ctx, note, kind, input_gates, hidden_gates, *states_and_biases):
        states = states_and_biases[: STATES[kind]]
        results = tuple(map(torch.empty_like, states))
        rows, hidden = states[0].shape
        kept = input_gates.new_empty(rows, WORKSPACE[kind] * hidden)
        note(touching(f"{kind} (gates)", [input_gates, hidden_gates, *states, *results, kept]))
        ctx.note, ctx.kind, ctx.biases = note, kind, len(states_and_biases) - len(states)
        ctx.save_for_backward(kept, *((states[-1], results[-1]) if kind == "lstm" else ()))
        return results

    @staticmethod
    def backward(ctx, *grads):
        kept, *_ = ctx.saved_tensors
        rows, hidden = grads[0].shape
        gates = [kept.new_empty(rows, GATES[ctx.kind] * hidden) for _ in range(1 if ctx.kind == "lstm" else 2)]
        states = tuple(map(torch.empty_like, grads))
        ctx.note(touching(f"{ctx.kind} backward (gates)", [*grads, *ctx.saved_tensors, *gates, *states]))
        biases = [each.sum(0) for each in gates] if ctx.biases else []
        both = lambda found: [found[0], found[-1]] if found else []
        of_states = [None, states[-1]] if ctx.kind == "lstm" else states  # the hidden one's comes by its product
        return None, None, *both(gates), *of_states, *both(biases)


def run_cell(note: Callable, kind: str, inputs, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """aten::lstm_cell and aten::gru_cell."""
    given = [inputs, *(hx if kind == "lstm" else [hx]), w_ih, w_hh, *(() if b_ih is None else (b_ih, b_hh))]
    if torch.is_autocast_enabled("cpu"):
        lower = torch.get_autocast_dtype("cpu")
        given = [each.to(lower) for each in given]
    inputs, *states, w_ih, w_hh = given[: 3 + STATES[kind]]
    results = _Cell.apply(note, kind, inputs @ w_ih.t(), states[0] @ w_hh.t(), *states, *given[3 + STATES[kind] :])
    return results if kind == "lstm" else results[0]


def _run(note: Callable, kind: str, shape: tuple, weights_per_layer: int, inputs, states: list, params: list):
    if torch.is_autocast_enabled("cpu"):  # aten/src/ATen/native/cudnn/RNN.cpp, _cudnn_rnn_cast_reflatten
        lower = torch.get_autocast_dtype("cpu")
        inputs, *rest = (each.to(lower) for each in (inputs, *states, *params))
    else:
        rest = [*states, *params]
    is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in (inputs, *rest))
    return _Layers.apply(note, kind, (*shape, is_trained), weights_per_layer, inputs, *rest)


def pad_packed(data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total_length: int):
    """torch._VF._pad_packed_sequence, which writes lengths into a tensor of its own: a fake one has no memory."""
    rows = batch_sizes.tolist()
    lengths = [sum(row > place for row in rows) for place in range(rows[0])]
    steps = max(len(rows), total_length)
    padded = data.new_full((steps * rows[0], *data.shape[1:]), padding)
    padded.index_copy_(0, torch.empty(len(data), dtype=torch.long, device=data.device), data)
    padded = padded.view(steps, rows[0], *data.shape[1:])
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths)
