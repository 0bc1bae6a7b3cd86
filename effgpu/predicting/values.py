"""Values that a step on fake tensors knows all the same: of masks, positions, labels, and offsets that were drawn.

A library that asks whether a mask holds only ones takes another kernel if it does, and a batch that is cut out at
random offsets has its length from them. So small tensors keep their numbers beside the fake tensor where they are made
from constants, drawn as whole numbers, or come from outside of the variant, while all that happens to them is known.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from effgpu.measuring.ops import arguments_of, name_arguments, tensors_of
from effgpu.measuring.torch_internals import FakeTensor, _disable_current_modes, storage_key, tree_map_only

aten = torch.ops.aten
# Elements of the largest tensor whose numbers are kept: a mask of 2,048 x 2,048.
MOST = 2**22
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FILLED_BY = {"full": 1, "full_like": 1, "new_full": 2}  # which argument it is
_SCALED = ("mul_", "div_", "add_", "sub_", "_foreach_mul_", "_foreach_div_", "_foreach_add_", "_foreach_sub_")
_MADE = ("arange", "eye", "linspace", "scalar_tensor", "tril_indices", "triu_indices", "randint", "randperm")
# Whatever the other operand is: true or anything is true, and zero with anything is zero.
_DECIDED_BY = {"logical_or": True, "bitwise_or": True, "__or__": True}
_DECIDED_BY |= {"logical_and": False, "bitwise_and": False, "__and__": False, "mul": False}


class Values:
    """The numbers of storages, as real tensors on the CPU that follow what happens to the fake ones."""

    def __init__(self):
        self._known: dict[int, torch.Tensor] = {}  # by storage: all its elements, or one, where all are equal
        self._assumed: set[int] = set()  # storages whose numbers are not known for certain
        self._leaves_out = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The numbers of a tensor; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if _is_small(tensor) and tensor.device.type == "cpu" else None
        if tensor.constant is not None:
            return tensor.constant
        whole = self._known.get(storage_key(tensor)) if self._known else None
        if whole is None or whole.dtype is not tensor.dtype or not _is_small(tensor):
            return None
        with _disable_current_modes():
            if not whole.dim():
                return whole.expand(tensor.shape)
            return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def are_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether the numbers of a tensor are such as `assume` gave, or follow from them."""
        return bool(self._assumed) and _is_fake(tensor) and storage_key(tensor) in self._assumed

    def assume(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        """Take what `make` gives as the numbers of a tensor, which nobody knows."""
        if self.keep(tensor, make):
            self._assumed.add(storage_key(tensor))

    def forget(self, storage: int) -> None:
        """Let go of what is known of a storage."""
        self._known.pop(storage, None)
        self._assumed.discard(storage)

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Inside, nothing is followed: of new tensors whose numbers nobody asks for, such as a bias of attention's."""
        self._leaves_out = True
        try:
            yield
        finally:
            self._leaves_out = False

    def follow(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """Do with the known numbers what an operation has done with the fake tensors."""
        if self._leaves_out:
            return
        self._follow(func, args, kwargs, result)
        if self._assumed and any(map(self.are_assumed, tensors_of((args, kwargs)))):
            made = filter(_is_fake, tensors_of((result, args[:1] if _written(func) else ())))
            self._assumed |= {storage_key(each) for each in made if self._knows(each)}

    def _follow(self, func, args: tuple, kwargs: dict, result: object) -> None:
        name = func.overloadpacket.__name__
        if name == "lift_fresh" and isinstance(result, FakeTensor) and self._knows(args[0]):  # torch.tensor([1, 2])
            self.keep(result, lambda: self.of(args[0]))
        if func.namespace != "aten" or func.is_view or name in ("empty", "detach"):
            return
        written = _written(func)
        if not written and isinstance(result, FakeTensor) and not _is_small(result):
            return
        given = tensors_of((args, kwargs))
        if written:
            named = name_arguments(func, args, kwargs)
            changed = [t for t in tensors_of([named.get(name) for name in written]) if isinstance(t, FakeTensor)]
            if any(tensor.constant is not None for tensor in changed):  # FakeTensorMode has changed it, too
                for tensor in changed:
                    self.keep(tensor, lambda tensor=tensor: tensor.constant)
                return
            if name in ("zero_", "fill_", "copy_") and changed and self._overwrite(changed[0], args):
                return
            known = _is_certain(func) and all(self._knows(tensor) for tensor in given)
            if known and name in _SCALED and len(given) == len(changed) and self._scale(func, args, kwargs):
                return
            if known:
                self._spread(changed)
            if not known or not self._repeat(func, args, kwargs):
                for tensor in changed:
                    self.forget(storage_key(tensor))
        elif isinstance(result, FakeTensor) and result.layout is torch.strided:
            if name in _FILLED or name in _FILLED_BY:
                self.fill(result, _FILLED[name] if name in _FILLED else args[_FILLED_BY[name]])
            elif name in _MADE if not given else all(self._knows(tensor) for tensor in given) and _is_certain(func):
                self._repeat(func, args, kwargs, result)
            elif name in _DECIDED_BY and self._is_decided(_DECIDED_BY[name], result.dtype, given):
                self.fill(result, _DECIDED_BY[name])
        elif isinstance(result, tuple) and given and all(map(self._knows, given)) and _is_certain(func):  # sort, topk
            self._repeat(func, args, kwargs, *filter(_is_fake, result))

    def _is_decided(self, by: bool, dtype: torch.dtype, given: list[torch.Tensor]) -> bool:
        """Whether one of the operands decides alone, as all its numbers are true, or zero."""
        if dtype.is_floating_point or (by and dtype is not torch.bool):
            return False
        known = [self.of(tensor) for tensor in given if self._knows(tensor)]
        with _disable_current_modes():
            return any(bool(each.all() if by else not each.any()) for each in known)

    def _knows(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return _is_small(tensor) and not tensor.requires_grad
        return bool(self._known) and storage_key(tensor) in self._known and _is_small(tensor)

    def _overwrite(self, tensor: torch.Tensor, args: tuple) -> bool:
        """Whether all of a storage has got known numbers."""
        storage, source = tensor.untyped_storage(), args[1] if len(args) > 1 else 0
        if not _is_small(tensor) or tensor.nbytes != storage.nbytes():
            return False
        if isinstance(source, torch.Tensor):
            source = self.of(source) if self._knows(source) else None
        if source is None:
            return False
        self.forget(storage_key(storage))
        if isinstance(source, torch.Tensor) and source.dim():
            self.keep(tensor, lambda: source.to(tensor.dtype).expand(tensor.shape))
        else:
            self.fill(tensor, source)
        return True

    def fill(self, tensor: torch.Tensor, value: object) -> None:
        """All of a storage's numbers are this one, which takes no memory for each."""
        if tensor.numel() and _is_small(tensor) and tensor.untyped_storage().nbytes() <= MOST * tensor.element_size():
            with _disable_current_modes(), torch.no_grad():
                self._known[storage_key(tensor)] = torch.as_tensor(value).to(tensor.dtype)

    def _scale(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether all numbers of each tensor were one, and are one again, after the same with that one alone."""
        changed, made = tensors_of(args), {}
        for tensor in changed:
            storage = tensor.untyped_storage()
            whole = self._known.get(storage_key(storage))
            if whole is None or whole.dim() or whole.dtype is not tensor.dtype or tensor.nbytes != storage.nbytes():
                return False
            made[storage_key(storage)] = whole
        with contextlib.suppress(RuntimeError), _disable_current_modes(), torch.no_grad():
            made = {key: whole.clone() for key, whole in made.items()}
            func(*tree_map_only(torch.Tensor, lambda each: made[storage_key(each)], args), **kwargs)
            self._known.update(made)
            return True
        return False

    def _spread(self, tensors: list[torch.Tensor]) -> None:
        """Give each element a number of its own, before some of them change."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if (whole := self._known.get(storage_key(storage))) is not None and not whole.dim():
                with _disable_current_modes():
                    self._known[storage_key(storage)] = whole.repeat(storage.nbytes() // whole.element_size())

    def _repeat(self, func, args: tuple, kwargs: dict, *results: torch.Tensor) -> bool:
        """Run the operation on the known numbers, and keep what it gives. Returns False if it cannot be."""
        real = functools.partial(tree_map_only, torch.Tensor, self.of)
        named = {key: real(value) for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        with contextlib.suppress(Exception), _disable_current_modes(), torch.no_grad():
            made = tensors_of(func(*real(args), **named))
            return all([self.keep(result, lambda each=each: each) for result, each in zip(results, made)])
        return False

    def keep(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> bool:
        """Remember what `make` gives as the numbers of a tensor, if these are few enough."""
        storage = tensor.untyped_storage()
        elements, rest = divmod(storage.nbytes(), tensor.element_size())
        if rest or elements > MOST or not tensor.numel() or not _is_small(tensor):
            return False
        with _disable_current_modes(), torch.no_grad():
            whole = torch.zeros(elements, dtype=tensor.dtype)
            whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(make())
        self._known[storage_key(storage)] = whole
        return True


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= MOST


@functools.cache
def _is_certain(func) -> bool:
    return torch.Tag.nondeterministic_seeded not in func.tags and not func.overloadpacket.__name__.startswith("new_e")


@functools.cache
def _written(func) -> tuple[str, ...]:
    """The arguments that an operation changes."""
    return tuple(each.name for each in arguments_of(func) if each.is_written)
