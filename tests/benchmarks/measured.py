"""What the lessons measured on GPUs beside what was predicted for them: docs/predict.md shows it.

PYTHONPATH=tests python -m benchmarks.measured [RESULTS.json ...] [--stored]

Prints the section "Measured by us" of the page. Without files, it reads those in effgpu/reference/. A lesson stores
what its variants were predicted to take on the GPU that measures them, before they run. With `--stored`, that is all.
Else each variant is also walked again, without a GPU, and predicted with the rules of today.

A results file has no kernels. So a walk takes the statements of the lesson that its comparison needs, and runs them
as on the GPU but for measuring. The lessons' batch on that GPU is found by the memory that was predicted there. What a
lesson compared when it was measured, and compares no more, is in earlier/.
"""

import argparse
import ast
import contextlib
import dis
import itertools
import json
import math
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from benchmarks.published_memory import tell_error
from torch.overrides import TorchFunctionMode

import effgpu
from effgpu import results, units
from effgpu.comparison import Comparison, _apply
from effgpu.course.lessons import LESSONS
from effgpu.course.sizes import BATCHES, CPU_SIZES, GPU_SIZES
from effgpu.measuring.variants import Variant
from effgpu.predicting.audited import CONVOLUTIONAL, TRANSFORMERS, family
from effgpu.predicting.full_size import _against
from effgpu.predicting.gpus import RATE_COLUMNS, Gpu, find_gpu
from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import Prediction
from effgpu.predicting.translator import on_cpu

NONE = "No results of a GPU are stored in effgpu/reference/ yet."
EARLIER = Path(__file__).with_name("earlier")
SAME_MEMORY, ALIKE = 0.002, 0.03  # predicted peaks that differ by less are the same, or those of another PyTorch


# --- the variants of a lesson, as on a GPU ---


def find_statements(path: Path, name: str) -> list[ast.stmt]:
    """The statements of a lesson that its comparison of this name needs, the comparison last; empty without one.

    A statement is needed if it gives a name, or a part of a name, that a needed statement or function uses.
    """
    statements, found = [], None
    for statement in itertools.chain(*read_cells(path)):
        statements.append(statement)
        if any(_is_comparison(node, name) for node in ast.walk(statement)):
            found = statement
            break
    return [] if found is None else with_what_they_need(statements[:-1], [found])


def with_what_they_need(statements: list[ast.stmt], last: list[ast.stmt]) -> list[ast.stmt]:
    """The last statements, and of those before them what gives a name, or a part of one, that they need."""
    needed, kept = set().union(*(names(each)[0] for each in last)), set()
    while more := [each for each in statements if each not in kept and names(each)[1] & needed]:
        kept.update(more)
        needed |= set().union(*(names(each)[0] for each in more))
    return [*(each for each in statements if each in kept), *last]


def read_cells(path: Path) -> list[list[ast.stmt]]:
    """The statements of each code cell of a notebook, with IPython's commands as calls of Python; those of a script."""
    if path.suffix == ".py":
        return [ast.parse(path.read_text(encoding="utf-8")).body]
    from IPython.core.inputtransformer2 import TransformerManager

    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [ast.parse(TransformerManager().transform_cell(source)).body for source in sources]


def _is_comparison(node: ast.AST, name: str) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "compare"
    return is_call and any(
        keyword.arg == "name" and isinstance(keyword.value, ast.Constant) and keyword.value.value == name
        for keyword in node.keywords
    )


def names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The names that a statement uses, in its functions, too, and those that it gives or changes."""
    uses, gives = set(), set()
    codes = [compile(ast.Module([statement], []), "lesson", "exec")]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_NAME", "STORE_GLOBAL") and (code is codes[0]):
                gives.add(instruction.argval)
            elif instruction.opname.startswith(("LOAD_NAME", "LOAD_GLOBAL")):
                uses.add(instruction.argval)
    if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        for node in ast.walk(statement):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                while isinstance(node, (ast.Attribute, ast.Subscript)):
                    node = node.value
                gives |= {node.id} & uses if isinstance(node, ast.Name) else set()
    return uses, gives


class OnCpu(TorchFunctionMode):
    """What is asked for on a GPU comes to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*map(on_cpu, args), **{key: on_cpu(value) for key, value in (kwargs or {}).items()})


class WithGpu(ast.NodeTransformer):
    """A lesson that asks whether there is a GPU is told so."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        asks = ast.unparse(node.func) == "torch.cuda.is_available"
        return ast.copy_location(ast.Constant(True), node) if asks else self.generic_visit(node)


class _Found(Exception):
    """The variants of a comparison, and its options."""


def find_variants(statements: list[ast.stmt], folder: Path) -> tuple[dict[str, Variant], dict[str, object]]:
    """The variants of a comparison, by label, and its options, from the statements that it needs."""

    def compare(variants, settings=None, **options):
        raise _Found(_apply(variants, settings), options)

    module = ast.fix_missing_locations(WithGpu().visit(ast.Module(statements, [])))
    with patch.object(effgpu, "compare", compare), contextlib.chdir(folder), OnCpu():
        try:
            exec(compile(module, "lesson", "exec"), {"__name__": "lesson"})
        except _Found as found:
            return found.args
    raise RuntimeError("expected statements that compare, got some that do not")


@contextlib.contextmanager
def sized_for_gpu(batch: int) -> Iterator[None]:
    """Inside, the course's workloads have a GPU's sizes, with this batch, and lessons take the device for a GPU."""
    sizes = {name: {"batch": batch, **size} for name, size in GPU_SIZES.items()}
    gpu = torch.device("cuda")
    with patch.dict(CPU_SIZES, sizes), patch.object(effgpu, "find_device", lambda: gpu):
        yield


def walk(comparison: Comparison, batches: list[int], folder: Path = LESSONS) -> dict[str, Prediction]:
    """The variants of a stored comparison, walked for the GPU that measured them; empty where no lesson has it.

    `batches` are those of comparisons before, tried first. The one that is found is put in front.
    """
    path, batch = find_batch(comparison, batches, folder)
    if batch is None:
        return {}
    gpu = find_gpu(comparison.device.name)
    with sized_for_gpu(batch):
        variants, _ = find_variants(find_statements(path, comparison.name), folder)
        return {label: predict(variants[label], gpu) for label in comparison.here if label in variants}


def find_batch(comparison: Comparison, batches: list[int], folder: Path = LESSONS) -> tuple[Path | None, int | None]:
    """The lesson of a stored comparison, and the batch that it was measured with; None where there is none.

    `batches` are those of comparisons before, tried first. The one that is found is put in front.
    """
    named = sorted(folder.glob("*.ipynb"), key=lambda path: not comparison.name.startswith(path.stem))
    named = *EARLIER.glob("*.py"), *named
    path = next((path for path in named if find_statements(path, comparison.name)), None)
    if path is None or not comparison.here:
        return path, None
    gpu, first = find_gpu(comparison.device.name), next(iter(comparison.here))
    wanted, tried = comparison.here[first].allocated, []
    for batch in dict.fromkeys([*batches, *BATCHES]):
        with sized_for_gpu(batch):
            variants, _ = find_variants(find_statements(path, comparison.name), folder)
            if first not in variants:
                return path, None
            off = predict(variants[first], gpu).for_gpu(gpu)[0].allocated / wanted - 1
        tried.append((abs(off), batch))
        if abs(off) < SAME_MEMORY or (off > 0 and batch not in batches):
            break
    off, batch = min(tried)
    has_its_own = len(tried) > 1 and len({each for each, _ in tried}) == 1  # a size that no batch changes
    if off > ALIKE and not has_its_own:
        return path, None
    batches[:] = dict.fromkeys([batch, *batches])
    return path, batch


# --- what was measured beside what was predicted ---


@dataclass(frozen=True)
class Judged:
    """A measured value, and what was predicted for it, from `low` to `high`."""

    measured: float
    expected: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.expected / self.measured - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def tell_error(self) -> str:
        return tell_error(self.error) + ", outside" * (not self.is_inside)


@dataclass(frozen=True)
class Outcome:
    """A variant that a GPU measured. `stored` and `now` are its time as predicted then and with the rules of today.

    The ratios are those to the baseline's time; `memory` has no range. None for what was not measured or not walked.
    """

    lesson: str
    label: str
    format: str | None
    bound: str
    stored: Judged
    now: Judged | None
    stored_ratio: Judged | None
    now_ratio: Judged | None
    memory: Judged | None


def judge(comparison: Comparison, walked: Mapping[str, Prediction]) -> list[Outcome]:
    """The variants of a comparison that were measured and predicted."""
    gpu, baseline = find_gpu(comparison.device.name), comparison.baseline
    times = {label: prediction.time(gpu) for label, prediction in walked.items()}
    outcomes = []
    for measured in comparison:
        label, here = measured.label, comparison.here.get(measured.label)
        if measured.median is None or here is None or here.seconds is None:
            continue
        time, theirs = times.get(label), times.get(baseline.label)
        ratio = measured.median / baseline.median if measured is not baseline and baseline.median else None
        allocated = _predict_peak(walked[label], gpu) if label in walked else here.allocated
        outcomes.append(
            Outcome(
                comparison.name,
                label,
                time and find_format(walked[label].for_gpu(gpu)[0]),
                time.bound if time else here.bound,
                Judged(measured.median, *here.seconds),
                time and Judged(measured.median, time.expected, time.low, time.high),
                _judge_ratio(ratio, here.ratio),
                _judge_ratio(ratio, time and theirs and _against(time, theirs)),
                Judged(measured.peak_allocated, *[allocated] * 3) if measured.peak_allocated else None,
            )
        )
    return outcomes


def _judge_ratio(measured: float | None, predicted: tuple[float, float, float] | None) -> Judged | None:
    """A ratio of times; None for two steps that run the same kernels, of which nothing was predicted."""
    return Judged(measured, *predicted) if measured and predicted and predicted[1] < predicted[2] else None


def _predict_peak(prediction: Prediction, gpu: Gpu) -> int:
    """What PyTorch's allocator is predicted to give, with the least that cuBLAS takes from it."""
    one, _ = prediction.for_gpu(gpu)
    return one.allocated + one.workspaces.low


def find_format(prediction: Prediction) -> str:
    """The format of most FLOPs of a step's matrix products, convolutions and attention."""
    flops = Counter()
    for segment in prediction.segments:
        for kernel, number in segment.kernels.items():
            flops[kernel.format] += number * kernel.flops
    format, most = max(flops.items(), key=lambda item: item[1], default=("", 0))
    return {"tf32": "TF32"}.get(format, format) if most else "no products"


def audit(paths: Iterable[Path], walks: bool = True) -> dict[str, list[Outcome]]:
    """The outcomes of results files by GPU. Comparisons of a CPU, and those without a prediction, have none."""
    audited: dict[str, list[Outcome]] = {}
    for path in paths:
        batches: list[int] = []
        for comparison in results.load(path):
            if comparison.device.kind == "cuda" and comparison.here:
                walked = _try_to_walk(comparison, batches) if walks else {}
                audited.setdefault(comparison.device.label, []).extend(judge(comparison, walked))
    return audited


def _try_to_walk(comparison: Comparison, batches: list[int]) -> dict[str, Prediction]:
    """The variants, walked; empty, with the reason on stderr, for a lesson that has changed too much."""
    try:
        if walked := walk(comparison, batches):
            return walked
        why = "no lesson compares so, or no batch gives the memory that was predicted"
    except Exception as error:  # a lesson's errors are of many types
        why = f"{type(error).__name__}: {error}"
    print(f"{comparison.name}: not walked: {why}", file=sys.stderr)
    return {}


def by_cell(audited: Mapping[str, list[Outcome]]) -> list[tuple[tuple[str, str, str], float]]:
    """A GPU, a kind of network and a format of each variant whose time was predicted, and its error."""
    found = []
    for gpu, outcomes in audited.items():
        for outcome in outcomes:
            kind = CONVOLUTIONAL if outcome.lesson.startswith("13") else TRANSFORMERS
            format = {"TF32": "tf32"}.get(outcome.format, outcome.format)
            if format in RATE_COLUMNS:
                error = (outcome.now or outcome.stored).error
                found.append(((family(find_gpu(gpu).name), kind, format), error))
    return found


# --- the section of the page ---


def section(audited: Mapping[str, list[Outcome]]) -> str:
    """The part of docs/predict.md between its markers, in Markdown."""
    if not any(audited.values()):
        return NONE
    return "\n\n".join("\n".join(part) for gpu, found in audited.items() if found for part in _tell_gpu(gpu, found))


def _tell_gpu(gpu: str, outcomes: list[Outcome]) -> Iterator[list[str]]:
    yield [f"### {gpu}"]
    groups = {"all variants": outcomes}
    for outcome in outcomes:
        groups.setdefault(outcome.format or "format not known", []).append(outcome)
    for outcome in outcomes:
        groups.setdefault(f"bound by {outcome.bound}", []).append(outcome)
    for outcome in outcomes:
        groups.setdefault(outcome.lesson, []).append(outcome)
    titles = ["", "variants", "rules of today", "90 %", "in range", "rules then", "90 %", "in range", "peak memory"]
    rows = [[name, str(len(those)), *_sum_up(those)] for name, those in groups.items()]
    ratios = [o for o in outcomes if o.stored_ratio or o.now_ratio]
    if ratios:
        halves = [_sum_up_times([getattr(o, which) for o in ratios]) for which in ("now_ratio", "stored_ratio")]
        rows.append(["ratios to the baseline", str(len(ratios)), *halves[0], *halves[1], units.NOT_MEASURED])
    yield _table(titles, rows, "|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    titles = ["lesson", "variant", "format", "bound by", "measured", "predicted", "range", "error"]
    titles += ["rules then", "peak", "error"]
    yield _table(titles, map(_tell_outcome, outcomes), "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|")


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], under: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", under, *(f"| {' | '.join(row)} |" for row in rows)]


def _sum_up(outcomes: list[Outcome]) -> list[str]:
    memory = [o.memory for o in outcomes if o.memory]
    told = f"{median(abs(each.error) for each in memory):.1%}" if memory else units.NOT_MEASURED
    return [*_sum_up_times([o.now for o in outcomes]), *_sum_up_times([o.stored for o in outcomes]), told]


def _sum_up_times(judged: Iterable[Judged | None]) -> list[str]:
    """Median error, the error that 9 of 10 stay below, and how many lie in their range."""
    judged = [each for each in judged if each]
    if not judged:
        return [units.NOT_MEASURED] * 3
    errors, inside = sorted(abs(each.error) for each in judged), sum(each.is_inside for each in judged)
    return [f"{median(errors):.1%}", f"{errors[math.ceil(0.9 * len(errors)) - 1]:.1%}", f"{inside} of {len(judged)}"]


def _tell_outcome(outcome: Outcome) -> list[str]:
    times = outcome.now or outcome.stored
    measured, expected, *ends = map(units.format_seconds, (times.measured, times.expected, times.low, times.high))
    memory = [units.NOT_MEASURED] * 2
    if outcome.memory:
        memory = [units.format_bytes(outcome.memory.measured), tell_error(outcome.memory.error)]
    now = outcome.now.tell_error() if outcome.now else units.NOT_MEASURED
    told = [measured, expected, " – ".join(ends), now, outcome.stored.tell_error(), *memory]
    return [outcome.lesson, outcome.label, outcome.format or units.NOT_MEASURED, outcome.bound, *told]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="results files; effgpu/reference/*.json without any")
    parser.add_argument("--stored", action="store_true", help="only what was predicted when it was measured")
    given = parser.parse_args(arguments)
    paths = given.paths or sorted(results.STORED.glob("*.json"))
    print(section(audit(paths, walks=not given.stored)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
