"""Whether the step that is predicted is the one that runs: what was seen of both is compared."""

import ast
import math
from collections.abc import Iterator

import torch

from effgpu.attaching.sites import Site, parse
from effgpu.diagnosing.observed import Observed
from effgpu.errors import CannotPredict
from effgpu.measuring.variants import Variant
from effgpu.predicting.prediction import Prediction
from effgpu.predicting.timeline import FORWARD, count_products
from effgpu.units import format_count

_ALIKE, _OTHER = 1.02, 2.0  # as factors of the FLOPs: not worth a word, and another step
_ASKS = ("is_available", "device_count", "is_bf16_supported", "get_device_capability")


def check_walked(seen: Observed, predicted: Prediction) -> list[str]:
    """What differs between the step that ran and the one that was walked on fake tensors, a line each.

    Raises RuntimeError where they are not the same step: all that is predicted would be of another one.
    """
    kernels = [kernel for event in predicted.events if event.phase == FORWARD for kernel in event.kernels]
    ran, walked = seen.multiplied, count_products(kernels)
    notes = []
    if ran:
        factor = max(ran, walked) / min(ran, walked) if walked else math.inf
        if factor > _OTHER:
            raise CannotPredict(f"{_differs(ran, walked)}: what it decides by values has no prediction")
        if factor > _ALIKE:
            notes.append(f"not known: {_differs(ran, walked)}")
    updates = any(event.optimizing for event in predicted.events)
    if updates != bool(seen.stepped):
        which = "was walked and not in the one that ran" if updates else "ran and not in the one that was walked"
        raise CannotPredict(f"the optimizer makes a step in the call that {which}")
    if seen.optimizers == () and not updates and predicted.owners["gradients"]:
        notes.append("no optimizer made a step in the calls that were looked at: its time and its state are left out")
    return notes


def _differs(ran: int, walked: int) -> str:
    ours, theirs = (format_count(flops, "FLOP") for flops in (walked, ran))
    return f"the step that was walked multiplies {ours} in its forward pass, and the one that ran {theirs}"


def find_branches(variant: Variant) -> list[str]:
    """The lines of the variant's file that decide by whether a GPU is here, where none is; one line of text each.

    What the file asks when it is loaded was answered by this machine, and what compares a device's name still is.
    The usual choice of a device, `"cuda" if torch.cuda.is_available() else "cpu"`, decides nothing else.
    """
    code = getattr(getattr(variant, "func", variant), "__code__", None)
    if torch.cuda.is_available() or code is None:
        return []
    found = dict.fromkeys(sorted({node.lineno for node in _decisions(parse(code.co_filename), at_load=True)}))
    taken = "a GPU may take another branch here than was taken, as this machine has none"
    return [f"{Site(code.co_filename, line)}: {taken}" for line in found]


def _decisions(node: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    if isinstance(node, ast.IfExp) and _chooses_device(node):
        return
    compares = isinstance(node, ast.Compare) and any(_is_name(part) for part in (node.left, *node.comparators))
    asks = isinstance(node, ast.Attribute) and node.attr in _ASKS and "cuda" in ast.unparse(node)
    if compares or (asks and at_load):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _decisions(child, at_load and not isinstance(node, (ast.FunctionDef, ast.Lambda)))


def _chooses_device(choice: ast.IfExp) -> bool:
    return {"cuda", "cpu"} <= {node.value.partition(":")[0] for node in ast.walk(choice) if _is_name(node)}


def _is_name(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu")
