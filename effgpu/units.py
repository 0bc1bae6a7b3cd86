"""Numbers as people read them. Everywhere else in the package: seconds, bytes, joules, FLOPs."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from effgpu.errors import BadArgument

KiB, MiB, GiB = 2**10, 2**20, 2**30

NOT_MEASURED = "–"


def format_seconds(seconds: float | None) -> str:
    """`0.0123` -> `"12.3 ms"`; `None` (not measured) -> `"–"`."""
    if seconds is not None and seconds >= 120:
        return _clock(seconds)
    return _scale(seconds, 1000, {1e-6: "µs", 1e-3: "ms", 1: "s"})


def format_bytes(count: float | None) -> str:
    """`1_500_000` -> `"1.43 MiB"`, in powers of 1024; `None` -> `"–"`."""
    if count is not None and abs(count) < KiB:
        return f"{count:.0f} B"
    return _scale(count, 1024, {1: "B", KiB: "KiB", MiB: "MiB", GiB: "GiB", 2**40: "TiB"})


def format_joules(joules: float | None) -> str:
    """`0.25` -> `"250 mJ"`; `None` -> `"–"`."""
    return _scale(joules, 1000, {1e-6: "µJ", 1e-3: "mJ", 1: "J", 1e3: "kJ", 1e6: "MJ"})


def format_count(count: float | None, unit: str = "") -> str:
    """A count or a rate to three digits: `2853, "samples/s"` -> `"2,850 samples/s"`; `None` -> `"–"`.

    From a million on, and for units with a capital, in powers of 1000: `1.3e12, "FLOP/s"` -> `"1.30 TFLOP/s"`.
    """
    prefixes = {1: "", 1e3: "k", 1e6: "M", 1e9: "G", 1e12: "T", 1e15: "P"}
    if unit[:1].isupper():
        return _scale(count, 1000, {scale: prefix + unit for scale, prefix in prefixes.items()})
    if count is None or abs(count) >= 999_500 or abs(count) < 999.5:
        return _scale(count, 1000, {s: f"{p} {unit}".strip() for s, p in prefixes.items() if s == 1 or s >= 1e6})
    return f"{float(f'{count:.3g}'):,.0f} {unit}".strip()


def format_speed(ratio: float | None, low: float | None = None, high: float | None = None) -> str:
    """A ratio of times in words: `4/3` -> `"1.33 × slower"`, which takes 1.33 times as long; `None` -> `"–"`.

    With its interval, `0.54, 0.5, 0.58` -> `"1.85 × faster [1.72, 2.00]"`. Without, what rounds to 1 is `"same"`.
    """
    if ratio is None:
        return NOT_MEASURED
    if low is None and is_same(ratio):
        return "same"
    text = f"{_beyond_1(ratio)} × slower" if ratio > 1 else f"{_beyond_1(1 / ratio)} × faster"
    return text if low is None else f"{text} {format_ends(low, high, slower=ratio > 1, fine=True)}"


def format_ends(low: float, high: float, *, slower: bool = False, fine: bool = False) -> str:
    """The interval of a ratio, where what is slower counts as more, or less: `0.5, 0.58` -> `"[1.72, 2.00]"`.

    Where its ends lie on two sides of 1, each says its own: `0.5, 1.2` -> `"[1.20 × slower, 2.00 × faster]"`.
    `fine` ends have as many digits as it takes to differ from 1: `"[1.002, 2.00]"`.
    """
    ends = (low, high) if slower else (1 / high, 1 / low)
    if ends[0] < 1:
        return f"[{', '.join(format_speed(end if slower else 1 / end) for end in ends)}]"
    return f"[{', '.join(map(_beyond_1 if fine else _three_digits, ends))}]"


def is_same(ratio: float) -> bool:
    """Whether a ratio rounds to 1, as people read it."""
    return _three_digits(max(ratio, 1 / ratio)) == "1.00"


def format_change(ratio: float | None) -> str:
    """A ratio as a signed percentage: `0.48` -> `"−52 %"`, `1.0834` -> `"+8.3 %"`, `1` -> `"0 %"`; `None` -> `"–"`."""
    if ratio is None:
        return NOT_MEASURED
    percent = round(100 * (ratio - 1), 1)
    percent = round(100 * (ratio - 1)) if abs(percent) >= 10 else percent  # not rounded twice
    return f"{percent:+,} %".replace("-", "−") if percent else "0 %"


# of each quantity that is compared
FORMATS = {"time": format_seconds, "memory": format_bytes, "energy": format_joules}


def read_ratio(name: str, value: object) -> float:
    """A ratio that a person gives: a positive number, or text such as `"2 × slower"`, `"−52 %"` or `"same"`.

    Raises ValueError, with the name, for anything else.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    text = str(value).strip().replace("−", "-") if isinstance(value, str) else ""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # as in "+1,200 %"
    if text == "same":
        return 1.0
    if (speed := re.fullmatch(r"(\d+\.?\d*) *[×x]? +(faster|slower)", text)) and float(speed[1]) > 0:
        return float(speed[1]) if speed[2] == "slower" else 1 / float(speed[1])
    if (change := re.fullmatch(r"([+-]?\d+\.?\d*) *%", text)) and float(change[1]) > -100:
        return 1 + float(change[1]) / 100
    raise ValueError(
        f"{name}: expected a ratio to the baseline, a positive number or text as '2 × faster' or '-50 %', got {value!r}"
    )


def check_positive(kind: type = Real, **values: object) -> None:
    """Raises ValueError, with its name, for a value that is not a positive and finite number of this kind."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            expected = "whole number" if kind is Integral else "number"
            raise BadArgument(f"{name}: expected a positive {expected}, got {value!r}")


def with_article(name: str) -> str:
    """A name of letters and numbers as it is spoken: "a T4", "an L4", "an 11 GiB"."""
    return ("an " if re.match(r"[AEFHILMNORSX8]|1[18]\b", name) else "a ") + name


def singular(unit: str) -> str:
    """One of what a unit names in the plural: "samples" -> "sample", "batches" -> "batch"."""
    return re.sub(r"(?<=ch)es$|s$", "", unit)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of strings as lines of text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def html_table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """What is in an HTML table of strings, escaped; without headings, it has no head."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<thead><tr>{head}</tr></thead>" * bool(head) + f"<tbody>{body}</tbody>"


def join_names(names: Sequence[str]) -> str:
    """Write several names as people do: "T4, P100 and V100"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def join_places(lines: Iterable[str]) -> list[str]:
    """Put lines that say the same of several places in the code into one.

    `["assumed: a.py:3 reads a number", "assumed: a.py:9 reads a number"]` -> `["assumed: a.py:3, a.py:9: reads a
    number"]`, and of several values in one place, too. Other lines stay as they are.
    """
    taken: dict[str, dict[str, None]] = {}
    for line in lines:
        found = re.fullmatch(r"(.* taken as )([^ :]+)", line)
        what, value = found.groups() if found else (line, "")
        taken.setdefault(what, {})[value] = None
    places: dict[tuple[str, str], dict[str, None]] = {}
    for line in (what + ", ".join(values) for what, values in taken.items()):
        found = re.fullmatch(r"(.*?)(\S+:\d+) (.*)", line)
        before, place, rest = found.groups() if found else (line, "", "")
        places.setdefault((before, rest), {})[place] = None
    return [f"{before}{', '.join(at)}{':' * (len(at) > 1)} {rest}".rstrip() for (before, rest), at in places.items()]


def _scale(value: float | None, base: int, names: dict[float, str]) -> str:
    """The value in the largest unit that it fills, a value that rounds up to `base` counted as full."""
    if value is None:
        return NOT_MEASURED
    if value == 0:
        return f"0 {names[1]}".rstrip()
    fitting = [scale for scale in names if abs(value) >= scale * (1 - 0.5 / base)] or [min(names)]
    scale = max(fitting)
    return f"{_three_digits(value / scale)} {names[scale]}".rstrip()


def _three_digits(value: float) -> str:
    """Three significant digits, never in exponent form: `0.0123`, `1.23`, `12.3`, `1023`."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{2 - exponent}f}"


def _beyond_1(ratio: float) -> str:
    """A ratio of at least 1 in three significant digits, or in as many as it takes to differ from 1."""
    if not is_same(ratio) or ratio == 1:
        return _three_digits(ratio)
    return f"{ratio:.{-math.floor(math.log10(ratio - 1))}f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
