"""Time single operations on a GPU, and hold the rules of effgpu/predicting/rates.py against them.

python tests/benchmarks/survey.py measure SURVEY.json        on a GPU, a minute; on a CPU a rehearsal with small shapes
python tests/benchmarks/survey.py compare SURVEY.json        anywhere: measured over predicted time
python tests/benchmarks/survey.py fit SURVEY.json            anywhere: constants from even rows, errors on odd ones
    --gpu NAME    predict for this GPU, instead of the one that measured

A row has an operation, a format, a shape and the microseconds of one call, on a GPU in a queue of calls. To predict it,
its operation is walked on fake tensors as `effgpu.predict` walks a step. So what is compared is the prediction itself.
The rows of an operation and format are numbered from 0. Constants are fitted on rows with an even number, and checked
on rows with an odd one. Of rows so short that the CPU may decide, neither is asked: they say what a call costs.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import time as clock
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional as F

from effgpu import units
from effgpu.measuring.device import describe, find_device, multiplying_as
from effgpu.predicting import rates
from effgpu.predicting.gpus import RATE_COLUMNS, Gpu, find_gpu
from effgpu.predicting.kinds import Segment
from effgpu.predicting.predict import predict
from effgpu.predicting.time import step_time

LIMIT = 90  # seconds of a survey: what is left then is left out
GROUPS, GROUP_SECONDS, MOST_CALLS = 5, 0.01, 200
ROTATED, MOST_SETS = 2e8, 8  # bytes of arguments that take turns, so that the L2 cache does not hold them; sets of them
CPU_DECIDES = 2.0  # the GPU's predicted work in a call has to be so many times as long as the CPU's part
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COPY, CALL = "copy_1GiB", "call_on_the_cpu"


class Operation(NamedTuple):
    """A function, and what draws a set of its arguments."""

    call: Callable
    draw: Callable[[], Sequence[torch.Tensor]]


# --- the operations: each function takes a dtype and a row's shape ---


def _random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device=find_device(), dtype=dtype, requires_grad=grad)


def _mm(dtype, rows, columns, depth):
    return Operation(torch.mm, lambda: (_random(rows, depth, dtype=dtype), _random(depth, columns, dtype=dtype)))


def _mm_weight_gradient(dtype, rows, columns, depth):
    return Operation(torch.mm, lambda: (_random(depth, rows, dtype=dtype).T, _random(depth, columns, dtype=dtype)))


def _bmm(dtype, batch, rows, columns, depth):
    draw = lambda: (_random(batch, rows, depth, dtype=dtype), _random(batch, depth, columns, dtype=dtype))
    return Operation(torch.bmm, draw)


def _elementwise(function: Callable, *others: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable:
    """An operation on a tensor of the row's shape, and on others whose shapes follow from it."""

    def operation(dtype, *shape):
        shapes = [shape, *(other(shape) for other in others)]
        return Operation(function, lambda: [_random(*each, dtype=dtype) for each in shapes])

    return operation


def _cross_entropy(dtype, texts, classes):
    target = torch.zeros(texts, dtype=torch.int64, device=find_device())
    return Operation(lambda logits: F.cross_entropy(logits, target), lambda: (_random(texts, classes, dtype=dtype),))


def _attention(dtype, batch, heads, length, width, causal, backward=False):
    def forward(q, k, v, grad):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def both(q, k, v, grad):
        q.grad = k.grad = v.grad = None
        forward(q, k, v, grad).backward(grad)

    shape = batch, heads, length, width
    draw = lambda: [_random(*shape, dtype=dtype, grad=number < 3) for number in range(4)]
    return Operation(both if backward else forward, draw)


def _convolution(layout: torch.memory_format, dtype, batch, inputs, outputs, size, kernel, stride, groups):
    weight = _random(outputs, inputs // groups, kernel, kernel, dtype=dtype).to(memory_format=layout)
    convolve = lambda images: F.conv2d(images, weight, None, stride, kernel // 2, 1, groups)
    return Operation(convolve, lambda: (_random(batch, inputs, size, size, dtype=dtype).to(memory_format=layout),))


def _adamw(kind: str, dtype, count, size):
    parameters = [torch.nn.Parameter(_random(size)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, **{kind: True})
    return Operation(lambda: optimizer.step(), lambda: ())


def _copy(dtype, size, on: str = "gpu", to: str = "gpu"):
    """A copy within the GPU's memory, or between it and the host's, "pinned" or "pageable"."""
    places = {"gpu": {"device": find_device()}, "pinned": {"pin_memory": True}, "pageable": {}}
    source, target = (torch.zeros(size, dtype=dtype, **places[place]) for place in (on, to))
    return Operation(lambda: target.copy_(source, non_blocking=True), lambda: ())


def _launch(dtype, size):
    return Operation(lambda x: x.add_(1), lambda: (torch.ones(size, device=find_device()),))


def _cast(x):
    return x.to(torch.bfloat16 if x.dtype is torch.float32 else torch.float32)


_SAME, _LAST = lambda shape: shape, lambda shape: shape[-1:]
_NORM = lambda x, weight, bias: torch.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
OPERATIONS: dict[str, Callable[..., Operation]] = {
    "mm": _mm,
    "mm_weight_gradient": _mm_weight_gradient,
    "mm_vocabulary": _mm,
    "bmm_scores": _bmm,
    "bmm_values": _bmm,
    "add": _elementwise(torch.add, _SAME),
    "add_bias": _elementwise(torch.add, _LAST),
    "gelu": _elementwise(F.gelu),
    "gelu_backward": _elementwise(lambda grad, x: torch.ops.aten.gelu_backward(grad, x), _SAME),
    "dropout": _elementwise(lambda x: torch.native_dropout(x, 0.1, True)),
    "cast": _elementwise(_cast),
    "transpose_copy": _elementwise(lambda x: x.T.contiguous()),
    "layer_norm": _elementwise(_NORM, _LAST, _LAST),
    "sum_rows": _elementwise(lambda x: x.sum(0)),
    "softmax": _elementwise(lambda x: x.softmax(-1)),
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    "attention_both_passes": partial(_attention, backward=True),
    "conv_nchw": partial(_convolution, torch.contiguous_format),
    "conv_nhwc": partial(_convolution, torch.channels_last),
    "adamw_fused": partial(_adamw, "fused"),
    "adamw_foreach": partial(_adamw, "foreach"),
    COPY: _copy,
    "launch": _launch,
}
HOST = {  # no rule predicts what goes over the bus
    "to_gpu_pinned_256MiB": partial(_copy, on="pinned"),
    "to_gpu_pageable_256MiB": partial(_copy, on="pageable"),
    "to_host_pinned_256MiB": partial(_copy, to="pinned"),
}


def _multiplying(op: str, format: str) -> contextlib.AbstractContextManager:
    """fp32 as it is in the rows of matrix products that say so, elsewhere TF32, as people train."""
    return multiplying_as("ieee" if op.startswith(("mm", "bmm")) and format == "fp32" else "tf32")


# --- measure ---


def list_rows(large: bool) -> Iterator[tuple[str, str, list]]:
    """Operation, format and shape of each row. The small ones are for a CPU, to rehearse."""
    widths = (768, 1024, 2048, 4096) if large else (64,)
    vocabularies = ((4096, 50257), (4096, 50304), (4096, 151936)) if large else ((64, 100),)
    heads = ((96, 512, 64), (384, 512, 64), (192, 1024, 64), (512, 128, 64)) if large else ((2, 16, 8),)
    for format in DTYPES:
        for tokens in (512, 4096, 16384) if large else (64,):
            for width in widths:
                for columns, depth in ((1, 1), (3, 1), (4, 1), (1, 4)):
                    yield "mm", format, [tokens, columns * width, depth * width]
                yield "mm_weight_gradient", format, [width, 4 * width, tokens]
        for tokens, vocabulary in vocabularies:
            yield "mm_vocabulary", format, [tokens, vocabulary, 768]
        for batch, length, width in heads:
            yield "bmm_scores", format, [batch, length, length, width]
            yield "bmm_values", format, [batch, length, width, length]
    for format in ("fp32", "bf16"):
        yield from _list_others(format, large)
    for count, width in ((150, 768), (300, 1024)) if large else ((3, 64),):
        for kind in ("fused", "foreach"):
            yield f"adamw_{kind}", "fp32", [count, width * width]
    yield COPY, "fp32", [2**28 if large else 2**10]
    yield "launch", "fp32", [1]


def _list_others(format: str, large: bool) -> Iterator[tuple[str, str, list]]:
    elementwise = ["add", "add_bias", "gelu", "gelu_backward", "dropout", "cast", "transpose_copy", "layer_norm"]
    elementwise.append("sum_rows")
    for shape in ((4096, 768), (16384, 768), (16384, 3072), (16384, 4096)) if large else ((64, 64),):
        for op in elementwise:
            yield op, format, list(shape)
    for batch, length in ((96, 512), (192, 1024)) if large else ((2, 16),):
        yield "softmax", format, [batch, length, length]
    for shape in ((4096, 50257), (2048, 151936)) if large else ((64, 100),):
        yield "cross_entropy", format, list(shape)
    long = (8, 12, 1024, 64, True), (32, 12, 512, 64, False), (4, 32, 2048, 128, True)
    for shape in long if large else ((1, 2, 16, 8, True),):
        yield "attention", format, list(shape)
        yield "attention_both_passes", format, list(shape)
    images = [(3, 64, 224, 7, 2, 1), (64, 64, 56, 3, 1, 1), (256, 64, 56, 1, 1, 1)]
    images += [(512, 512, 7, 3, 1, 1), (1024, 2048, 14, 1, 2, 1), (144, 144, 56, 3, 1, 144)]
    for layout in ("nchw", "nhwc"):
        for shape in images if large else ((3, 4, 8, 3, 1, 1),):
            yield f"conv_{layout}", format, [64 if large else 1, *shape]


def measure(path: Path) -> None:
    """Time all rows on this device, in LIMIT seconds at most, and write them to a JSON file."""
    began, rows, on_gpu = clock.perf_counter(), [], find_device().type == "cuda"
    listed = list(list_rows(on_gpu))
    if on_gpu:
        listed += [(op, "fp32", [2**26]) for op in HOST]
    torch.backends.cudnn.benchmark = True
    for op, format, shape in listed:
        if clock.perf_counter() - began < LIMIT:
            rows.append({"op": op, "format": format, "shape": shape} | _measure(op, format, shape))
    rows.append({"op": CALL, "format": "fp32", "shape": [1], "us": 1e6 * _time_calls(_launch(None, 1))})
    device = describe()
    about = {"device": device.name if on_gpu else "cpu", "versions": device.versions}
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=0) + "\n", encoding="utf-8")
    failed = [row["error"] for row in rows if "error" in row]
    print(f"{about['device']}: {len(rows)} rows, {len(failed)} failed", *failed[:3], sep="\n")


def _measure(op: str, format: str, shape: list) -> dict[str, object]:
    try:
        with _multiplying(op, format):
            operation = (OPERATIONS | HOST)[op](DTYPES[format], *shape)
            arguments = [operation.draw()]
            if size := sum(tensor.nbytes for tensor in arguments[0]):
                arguments += [operation.draw() for _ in range(min(MOST_SETS, int(ROTATED / size)) - 1)]
            return {"us": 1e6 * _time(operation.call, arguments)}
    except (RuntimeError, torch.OutOfMemoryError) as error:  # a format that the GPU has not, or too little memory
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _time(call: Callable, arguments: list) -> float:
    """Seconds of one call, where sets of arguments take turns: the median of some groups of calls."""
    for _ in range(3):
        once = _time_group(call, arguments, len(arguments))
    count = max(len(arguments), min(MOST_CALLS, int(GROUP_SECONDS / max(once, 1e-6))))
    return statistics.median(_time_group(call, arguments, count) for _ in range(GROUPS))


def _time_group(call: Callable, arguments: list, count: int) -> float:
    if find_device().type == "cpu":
        start = clock.perf_counter()
        for number in range(count):
            call(*arguments[number % len(arguments)])
        return (clock.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for number in range(count):
        call(*arguments[number % len(arguments)])
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def _time_calls(operation: Operation, count: int = 2000) -> float:
    """Seconds that the CPU takes for a call, without a wait for the GPU."""
    arguments = operation.draw()
    operation.call(*arguments)
    start = clock.perf_counter()
    for _ in range(count):
        operation.call(*arguments)
    return (clock.perf_counter() - start) / count


# --- compare ---


@dataclass(frozen=True)
class Row:
    """A measured row, with the kernels and the calls of the CPU that the walk of its operation noted.

    `number` is its place among the rows of its operation and format. `format` is that of the kernel that takes longest.
    """

    op: str
    format: str
    shape: tuple
    seconds: float
    number: int
    segment: Segment
    kind: str
    is_short: bool = False

    @property
    def is_even(self) -> bool:
        return self.number % 2 == 0

    def predict(self, gpu: Gpu) -> float:
        """Seconds that the GPU is predicted to work."""
        return sum(row.seconds for row in step_time([self.segment], gpu).table.values())

    def error(self, gpu: Gpu) -> float:
        """The logarithm of measured over predicted seconds."""
        return math.log(self.seconds / self.predict(gpu))

    @property
    def flops(self) -> int:
        return sum(number * kernel.flops for kernel, number in self.segment.kernels.items())


def find_uncached(name: str) -> Gpu:
    """The GPU of this name, without its L2 cache: the arguments of a row take turns, so that it does not hold them."""
    return replace(find_gpu(name), cache=0)


def read(survey: dict, gpu: Gpu) -> list[Row]:
    """The rows of a survey that a walk can predict for a GPU, each walked. What failed is left out."""
    rows, numbers = [], {}
    costs = [row["us"] * 1e-6 for row in survey["rows"] if row["op"] == CALL]
    for row in survey["rows"]:
        if row["op"] not in OPERATIONS or "us" not in row:
            continue
        key = row["op"], row["format"]
        numbers[key] = numbers.get(key, -1) + 1
        segment = walk(*key, row["shape"], gpu)
        longest = max(segment.kernels, key=lambda kernel: max(rates.kernel_seconds(kernel, gpu)))
        told = Row(*key, tuple(row["shape"]), row["us"] * 1e-6, numbers[key], segment, longest.kind)
        cpu = segment.calls * (costs[0] if costs else gpu.launch)
        is_short = min(told.seconds, told.predict(gpu)) < CPU_DECIDES * cpu
        rows.append(replace(told, format=longest.format, is_short=is_short))
    return rows


def walk(op: str, format: str, shape: Sequence, gpu: Gpu) -> Segment:
    """The kernels of an operation on a GPU, found as `effgpu.predict` finds those of a step."""

    def variant():
        operation = OPERATIONS[op](DTYPES[format], *shape)
        arguments = operation.draw()
        return lambda: operation.call(*arguments)

    with _multiplying(op, format):
        (segment,) = predict(variant, gpu).segments
    return segment


def compare(rows: Iterable[Row], gpu: Gpu) -> list[str]:
    """Lines of text: by operation and format, the median and the worst of measured over predicted time."""
    groups: dict[tuple[str, str], list[Row]] = {}
    rows = list(rows)
    for row in rows:
        if not row.is_short:
            groups.setdefault((row.op, row.format), []).append(row)
    table = [("operation", "format", "even rows", "median", "worst", "odd rows", "median", "worst", "measured rate")]
    for (op, format), those in groups.items():
        halves = [_tell_errors([row.error(gpu) for row in those if row.is_even is even]) for even in (True, False)]
        table.append((op, format, *halves[0], *halves[1], _tell_rates(those)))
    lines = ["measured time over predicted time: above 1, the prediction is too fast", "", *units.align(table)]
    if short := [row.seconds / row.segment.calls for row in rows if row.is_short]:
        cost = f"{1e6 * statistics.median(short):.1f} µs a call, predicted {1e6 * gpu.launch:.1f}"
        lines += ["", f"{len(short)} short rows, in which the CPU may decide: {cost}"]
    return lines


def _tell_errors(errors: list[float]) -> tuple[str, str, str]:
    if not errors:
        return "0", units.NOT_MEASURED, units.NOT_MEASURED
    return str(len(errors)), *(f"{math.exp(e):.2f}" for e in (statistics.median(errors), max(errors, key=abs)))


def _tell_rates(rows: list[Row]) -> str:
    """The lowest and the highest rate of some rows: of FLOPs, or of bytes where there are none."""
    unit = "FLOP/s" if rows[0].flops else "B/s"
    moved = lambda row: sum(number * kernel.bytes for kernel, number in row.segment.kernels.items())
    reached = [(row.flops or moved(row)) / row.seconds for row in rows]
    return " to ".join(dict.fromkeys(units.format_count(rate, unit) for rate in (min(reached), max(reached))))


# --- fit ---

SCALARS = "FILL_SECONDS", "MISALIGNED", "HUNGER"  # of rates.py, for all GPUs
OF_GENERATION = "even", "uneven", "norms", "softmax", "lists", "odd_channels"  # of SHARES in rates.py
BANDWIDTH, SHARE = "bandwidth_GBps", "attention "
DECIDES = 0.2  # the power of a constant in a row's time, from which on the row is asked
ROUNDS, TRIALS, FARTHEST = 6, 18, 1.1  # of the search; the farthest is e^1.1, three times as much
OUTLIER = 0.2  # a logarithm: what is farther off counts by its distance, and not by its square


def constants(gpu: Gpu) -> dict[str, float]:
    """What may be fitted: columns of the GPU's line in gpus.csv, shares of its generation and constants of rates.py."""
    values = {RATE_COLUMNS[format]: rate / 1e12 for format, rate in gpu.rates} | {BANDWIDTH: gpu.bandwidth / 1e9}
    shares = rates.SHARES.get(gpu.capability, rates.USUAL)
    values |= {SHARE + name: share for name, share in shares.attention.items()}
    values |= {name: getattr(shares, name) for name in OF_GENERATION}
    return values | {name: getattr(rates, name) for name in SCALARS}


@contextlib.contextmanager
def applied(values: dict[str, float], gpu: Gpu) -> Iterator[Gpu]:
    """Inside, the rules have these constants. Gives the GPU with them."""
    attention = {name.removeprefix(SHARE): value for name, value in values.items() if name.startswith(SHARE)}
    shares = rates.SHARES.get(gpu.capability, rates.USUAL)
    shares = shares._replace(attention=attention, **{name: values[name] for name in OF_GENERATION})
    of_formats = tuple((format, values[RATE_COLUMNS[format]] * 1e12) for format, _ in gpu.rates)
    changed = {name: values[name] for name in SCALARS} | {"SHARES": rates.SHARES | {gpu.capability: shares}}
    rates.kernel_seconds.cache_clear()
    try:
        with patch.multiple(rates, **changed):
            yield replace(gpu, rates=of_formats, bandwidth=values[BANDWIDTH] * 1e9)
    finally:
        rates.kernel_seconds.cache_clear()


def errors(rows: Sequence[Row], values: dict[str, float], gpu: Gpu) -> list[float]:
    """The logarithm of measured over predicted seconds of each row, with these constants."""
    with applied(values, gpu) as changed:
        return [row.error(changed) for row in rows]


def fit(rows: Iterable[Row], gpu: Gpu) -> tuple[dict[str, float], dict[str, int]]:
    """Constants with which the even rows are met best, and how many rows decide each. The others stay as they are.

    The bandwidth is that of the large copy, as in `effgpu calibrate`. Each other constant is sought in turn, several
    times, on the rows whose time depends on it. Rows that the CPU may decide are left out.
    """
    rows = [row for row in rows if not row.is_short]
    values, asked = constants(gpu), {}
    for copy in (row for row in rows if row.op == COPY):
        moved = sum(number * kernel.bytes for kernel, number in copy.segment.kernels.items())
        values[BANDWIDTH], asked[BANDWIDTH] = moved / copy.seconds / 1e9, 1
    rows = [row for row in rows if row.is_even and row.op != COPY]
    for _ in range(ROUNDS):
        before = dict(values)
        for name in values:
            if name == BANDWIDTH or not (those := _find_decided(rows, name, values, gpu)):
                continue
            values[name] *= math.exp(_find_least(partial(_loss, those, name, values, gpu)))
            asked[name] = len(those)
        if all(abs(math.log(values[name] / before[name])) < 0.002 for name in values):
            break
    return values, asked


def _find_decided(rows: list[Row], name: str, values: dict[str, float], gpu: Gpu) -> list[Row]:
    """The rows whose time depends on a constant."""
    step = 0.02
    found = errors(rows, values, gpu), errors(rows, values | {name: values[name] * math.exp(step)}, gpu)
    return [row for row, before, after in zip(rows, *found) if abs(after - before) > DECIDES * step]


def _loss(rows: list[Row], name: str, values: dict[str, float], gpu: Gpu, off: float) -> float:
    """What is to be small: squares of logarithms, lines for outliers (Huber, 1964)."""
    found = map(abs, errors(rows, values | {name: values[name] * math.exp(off)}, gpu))
    return sum(e**2 if e < OUTLIER else OUTLIER * (2 * e - OUTLIER) for e in found)


def _find_least(loss: Callable[[float], float]) -> float:
    """Where a function with one valley is least, between -FARTHEST and FARTHEST: by the golden section."""
    golden = (math.sqrt(5) - 1) / 2
    low, high = -FARTHEST, FARTHEST
    points = [high - golden * (high - low), low + golden * (high - low)]
    found = list(map(loss, points))
    for _ in range(TRIALS):
        if found[0] < found[1]:
            high, points[1], found[1] = points[1], points[0], found[0]
            points[0] = high - golden * (high - low)
            found[0] = loss(points[0])
        else:
            low, points[0], found[0] = points[0], points[1], found[1]
            points[1] = low + golden * (high - low)
            found[1] = loss(points[1])
    middle = (low + high) / 2
    return middle if loss(middle) < loss(0.0) else 0.0


def tell_fit(rows: Iterable[Row], gpu: Gpu) -> list[str]:
    """Lines of text: the constants now and proposed, and the errors of even and odd rows before and after."""
    rows, before = [row for row in rows if not row.is_short], constants(gpu)
    after, asked = fit(rows, gpu)
    table = [("constant", "now", "proposed", "rows that decide it")]
    table += [(name, f"{before[name]:.4g}", f"{after[name]:.4g}", str(asked.get(name, 0))) for name in before]
    errors_table = [("kind", "format", "rows", "number", "error before", "error after", "spread after")]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        half = "even" if row.is_even else "odd"
        for key in ((row.kind, row.format, half), ("all", "", half)):
            groups.setdefault(key, []).append(row)
    for key, those in sorted(groups.items()):
        found = [errors(those, values, gpu) for values in (before, after)]
        medians = [f"{statistics.median(map(abs, each)):.1%}" for each in found]
        spread = f"{statistics.pstdev(found[1]):.2f}" if len(those) > 1 else units.NOT_MEASURED
        errors_table.append((*key, str(len(those)), *medians, spread))
    with applied(after, gpu) as changed:
        told = compare(rows, changed)
    notes = [
        "error: the median, as a logarithm; spread: the standard deviation, beside SPREAD of spreads.py",
        "rates are those of large products, bandwidth that of a large copy; launch_us and kernel_us are not fitted",
    ]
    return [*units.align(table), "", *units.align(errors_table), "", *notes, "", "With the proposed constants:", *told]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["measure", "compare", "fit"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gpu", help="predict for this GPU, instead of the one that measured")
    given = parser.parse_args(arguments)
    if given.what == "measure":
        measure(given.path)
        return 0
    survey = json.loads(given.path.read_text(encoding="utf-8"))
    gpu = find_uncached(given.gpu or survey["about"]["device"])
    rows = read(survey, gpu)
    print(f"{given.path.name}, measured on {survey['about']['device']}, predicted for {gpu.name}: {len(rows)} rows")
    print(*(compare if given.what == "compare" else tell_fit)(rows, gpu), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
