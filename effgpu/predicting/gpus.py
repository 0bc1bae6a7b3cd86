"""The GPUs that a prediction is for: a table of what each has and reaches, with the reader's own lines before it.

Sources in gpus.csv, by their short names: zzc0721/torch-performance-test-data@9d828276,
chsasank/device-benchmarks@7ccc8838, mli/transformers-benchmarks@3370b2b3, stas00/ml-engineering@744d01e1 (MAMF),
RRZE-HPC/gpu-benches@1038c5d0, sitar-lab/NeuSight@6945927d and linkedin/Liger-Kernel@ead96b6 on GitHub.
Multiprocessors and L2 caches are those of data sheets, memory and contexts those of public error reports.
Rates of short runs were lowered by 7 %: by so much they are above longer ones where both are known. A line that has
only a data sheet takes the share of it that a card of the same generation reaches. `products_spread` is by how much
sources of 16-bit rates differ. `launch_us` is ours: litgpt's phi-1.5 asks for 7 µs,
pytorch-gpu-benchmark's calibration rows for 25 to 40.
"""

import csv
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from numbers import Real
from pathlib import Path

from effgpu.errors import BadArgument
from effgpu.predicting.audited import family
from effgpu.units import GiB, MiB, align, check_positive, format_bytes, format_count, format_seconds

TABLE = Path(__file__).with_name("gpus.csv")
RATE_COLUMNS = {"fp32": "fp32_TFLOPS", "tf32": "tf32_TFLOPS", "fp16": "fp16_TFLOPS", "bf16": "bf16_TFLOPS"}
_UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT = (8, 0), (100 * MiB, 900 * MiB)


# FLOPs in fp64 of a multiprocessor in each cycle: CUDA C++ Programming Guide, throughput of arithmetic instructions.
_FP64, _FP64_ELSEWHERE, _CYCLES = {(6, 0): 64, (7, 0): 64, (8, 0): 128, (9, 0): 256, (10, 0): 128}, 4, 1.5e9
FP8, FP8_FROM = "float8", (8, 9)  # the lowest capability whose tensor cores multiply it, at twice the rate of fp16


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in bytes, its compute capability, the range of bytes that a CUDA context takes, and its speed.

    `memory` is what PyTorch's messages call the total capacity. Cards of one name differ by drivers and ECC by up to
    2 %: this is the least that public error reports show. A context's size depends on the driver, the CUDA version and
    the kernels that a step loads.

    `rates` are the FLOP/s that large matrix products reach, by format ("fp32", "tf32", "fp16", "bf16"), and `spread` is
    by how much sources differ for tensor cores, as a share (a T4 gets hot: 25 to 42 TFLOP/s in fp16); `bandwidth` is
    the bytes per second that a large copy reaches. `cache` is the size of the L2 cache in bytes. `kernel` is the least
    number of seconds that a kernel takes in a stream of them, `launch` what the CPU usually takes to call an
    operation. A GPU that is given as a size has none of these: None.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    context: tuple[int, int]
    multiprocessors: int | None = None
    rates: tuple[tuple[str, float], ...] | None = None
    bandwidth: float | None = None
    cache: int = 0
    kernel: float = 0.0
    launch: float = 0.0
    spread: float = 0.1

    def rate(self, format: str) -> float:
        """FLOP/s of large matrix products. TF32 is fp32 on a GPU that has none."""
        rates = dict(self.rates)
        if format == "fp64":
            return _FP64.get(self.capability, _FP64_ELSEWHERE) * self.multiprocessors * _CYCLES
        if format.startswith(FP8) and self.capability >= FP8_FROM:
            return 2 * rates["fp16"]
        return rates.get(format) or rates["fp32"]


GpuLike = str | float | Gpu  # a name, a size, or the GPU itself


def read_table(path: Path) -> dict[str, Gpu]:
    """The GPUs of a table such as gpus.csv, by name. Raises ValueError, with the line, for one that cannot be read."""
    gpus = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                gpu = _read(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise BadArgument(
                    f"{path}, line {number}: expected a GPU as in {TABLE.name} ({type(error).__name__}: {error})"
                ) from error
            gpus[gpu.name] = gpu
    return gpus


def _read(row: dict[str, str]) -> Gpu:
    number = lambda column: float(row[column])
    least, most = (int(size) * MiB for size in row["context_MiB"].split("-"))
    major, minor = row["capability"].split(".")
    gpu = Gpu(
        row["name"],
        int(number("memory_GiB") * GiB),
        (int(major), int(minor)),
        (least, most),
        int(row["multiprocessors"]),
        tuple((format, float(row[column]) * 1e12) for format, column in RATE_COLUMNS.items() if row[column]),
        number("bandwidth_GBps") * 1e9,
        int(number("l2_MiB") * MiB),
        number("kernel_us") * 1e-6,
        number("launch_us") * 1e-6,
        number("products_spread"),
    )
    numbers = {"memory": gpu.memory, "multiprocessors": gpu.multiprocessors, "bandwidth": gpu.bandwidth}
    check_positive(**numbers, fp32=gpu.rate("fp32"))
    return gpu


def tell(gpu: Gpu) -> list[str]:
    """What a GPU of known speed reaches, as lines of text."""
    rates = [(f"products in {name}", format_count(rate, "FLOP/s")) for name, rate in gpu.rates]
    bandwidth = ("bandwidth", format_count(gpu.bandwidth, "B/s"))
    times = [("a kernel, at least", gpu.kernel), ("the CPU, to launch an operation", gpu.launch)]
    return align([("GPU", gpu.name), *rates, bandwidth, *((name, format_seconds(time)) for name, time in times)])


def own_table() -> Path:
    """Where `effgpu calibrate` keeps the lines of the reader's own GPUs."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "effgpu" / "gpus.csv"


@cache
def _shipped() -> dict[str, Gpu]:
    return read_table(TABLE)


def known_gpus() -> dict[str, Gpu]:
    """The GPUs by name: those of the package's table, and the reader's own, which win over lines of the same name."""
    try:
        own = own_table()
        return _shipped() | (read_table(own) if own.is_file() else {})
    except (PermissionError, RuntimeError):  # a home of another user's, or none
        return _shipped()


def find_gpus(gpus: GpuLike | Iterable[GpuLike] | None) -> tuple[Gpu, ...]:
    """One or several as `find_gpu` finds them; None is all that are known."""
    if gpus is None:
        return tuple(known_gpus().values())
    several = isinstance(gpus, Iterable) and not isinstance(gpus, str)
    return tuple(map(find_gpu, gpus if several else (gpus,)))


def gpu_here(name: str, memory: int, capability: tuple[int, int] | None) -> Gpu:
    """The GPU of this name, or where it has no line in the table, one of these properties and without a speed."""
    try:
        return find_gpu(name)
    except ValueError:
        return Gpu(name, memory, capability or _UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT)


def find_gpu(gpu: GpuLike) -> Gpu:
    """The GPU of a name or a size: "T4", "a100-80", "16 GiB", 16 * GiB. Raises ValueError for any other.

    A name without its size, as "A100", is the smallest GPU of that name.
    """
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, Real):
        check_positive(gpu=gpu)
        return Gpu(format_bytes(gpu), int(gpu), _UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT)
    known = known_gpus()
    if isinstance(gpu, str):
        if size := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)\s*", gpu, re.IGNORECASE):
            unit = {"gib": GiB, "gb": 10**9, "mib": MiB, "mb": 10**6}[size[2].lower()]
            memory = float(size[1]) * unit
            check_positive(gpu=memory)
            return Gpu(gpu.strip(), int(memory), _UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT)
        for pattern in (_MAKER, f"{_MAKER}|{_FORM}"):  # a card's form counts where the table has a line for it
            wanted = _simplify(gpu, pattern)
            for entry in known.values():
                name = _simplify(entry.name, pattern)
                if wanted == name or (wanted.startswith(name) and _is_of_size(entry, wanted.removeprefix(name))):
                    return entry
        sizes = [each for each in known.values() if _simplify(family(each.name), _MAKER) == wanted]
        if sizes:
            return min(sizes, key=lambda each: each.memory)
    guess = _guess(gpu, known) if isinstance(gpu, str) else ""
    raise BadArgument(f'gpu: {guess}expected one of {", ".join(known)} or a size as "16 GiB", got {gpu!r}')


def _guess(given: str, known: Iterable[str]) -> str:
    """Which card may be meant: one with the same number in its name, as others are other cards."""
    number = re.search(r"\d+", given)
    alike = [name for name in known if number and re.findall(r"\d+", name)[:1] == [number[0]]]
    names = {_simplify(name, _MAKER): name for name in alike}
    found = get_close_matches(_simplify(given, _MAKER), names, n=1, cutoff=0.5)
    return f"did you mean {names[found[0]]}? " if found else ""


def check_speed(gpu: Gpu) -> None:
    """Raise ValueError for a GPU whose speed is not known."""
    if gpu.bandwidth is None:
        raise BadArgument(f"gpu: expected a GPU whose speed is known, such as T4, got {gpu.name}")


# What does not tell cards apart. The size in a GH200's name is that of its CPU's memory.
_MAKER = r"(?<=gh200) (120|480)gb|(?<=\d)\s*gb|nvidia|geforce|tesla|rtx|blackwell (server|workstation) edition"
_FORM = r"sxm\d?|pcie|hbm\d?"


def _is_of_size(gpu: Gpu, size: str) -> bool:
    """Whether a GPU is sold with so many GB. What PyTorch calls its capacity is up to a tenth less."""
    return size.isdecimal() and 0.9 * int(size) <= gpu.memory / GiB <= int(size)


def _simplify(name: str, pattern: str) -> str:
    return re.sub(rf"{pattern}|[^a-z0-9]", "", name.lower())
