"""The order in which a backward pass runs what another pass has made, as for a gradient penalty.

Of what is ready, autograd runs first what has the highest number (torch/csrc/autograd/engine.h, CompareNodeTaskTime).
Each thread counts for itself (ATen/SequenceNumber.cpp), and a GPU has a thread for its passes: what `create_graph`
makes there has low numbers, and mostly comes after what a forward pass has made. Here, one thread counts both.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator

import torch

from effgpu.measuring.torch_internals import _current_graph_task_id, _get_sequence_nr

_BEFORE_ALL = 2**62


class Order:
    """Gives what passes make the place that it has on a GPU."""

    def __init__(self):
        self._first = 0  # the next number as the pass that runs began
        self._made = 0  # by all passes before it
        self._counted: list[int] = []  # by the forward passes, where a pass ended,
        self._ahead: list[int] = [0]  # and what was made by passes until then: so far ahead are the numbers here

    def run(self, run_backward: Callable, tensors: tuple, *args, **kwargs) -> tuple:
        """Run a pass, which may lie within another. `args` are those of `torch.autograd.graph._engine_run_backward`."""
        is_outermost = _current_graph_task_id() == -1
        begun = _get_sequence_nr()
        if is_outermost:
            self._first = begun
        result = run_backward(tensors, *args, **kwargs)
        _, _, creates_graph, *_ = args
        if creates_graph and _get_sequence_nr() > begun:
            made = result or (leaf.grad for leaf in leaves(tensors))
            for node in _nodes(made, begun):
                node._set_sequence_nr(self._place(node._sequence_nr()))
        if is_outermost and (passed := _get_sequence_nr() - self._first):
            self._counted.append(self._first - self._made)
            self._made += passed
            self._ahead.append(self._made)
        return result

    def _place(self, number: int) -> int:
        """The number, among those here, of what has this one here and a lower one on a GPU."""
        of_gpu = self._made + number - self._first
        if of_gpu >= self._first - self._made:  # than which the forward passes have not come further
            return _BEFORE_ALL + of_gpu
        return of_gpu + self._ahead[bisect(self._counted, of_gpu)]


def _nodes(tensors: Iterable[torch.Tensor | None], begun: int) -> Iterator[torch.autograd.graph.Node]:
    """The nodes behind tensors, each once, which have this number or a higher one: what a pass made, since it began."""
    return (node for node in _behind(tensors, begun) if begun <= node._sequence_nr() < _BEFORE_ALL)


def leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward pass from these tensors gives gradients."""
    return [node.variable for node in _behind(tensors, 0) if hasattr(node, "variable")]


def _behind(tensors: Iterable[torch.Tensor | None], begun: int) -> Iterator[torch.autograd.graph.Node]:
    """Those and, of a leaf, what adds up its gradient, which has the highest number that there is."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor is not None]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node._sequence_nr() >= begun:
            seen.add(node)
            waiting += (before for before, _ in node.next_functions)
            yield node
