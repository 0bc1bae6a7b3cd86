"""Tests of `ablate`: which combinations it compares, in which order, with which keywords, and what it refuses."""

import pytest
import torch

from effgpu import comparison
from effgpu.ablation import MOST_FOR_ALL, ablate
from effgpu.comparison import BASELINE_FAILED, Comparison
from effgpu.measuring.device import memory_limit
from effgpu.measuring.measurement import OUT_OF_MEMORY
from effgpu.units import MiB


def build(**on):
    return on


@pytest.fixture
def asked(monkeypatch, make_measurement):
    """What is to be measured: the keywords that `build` gets, by label, and the options."""
    asked = {}

    def measure_all(variants, *, items, unit, **options):
        asked.update(keywords={label: variant() for label, variant in variants.items()}, options=options)
        return [make_measurement(label, items=items[label] if items else None, unit=unit) for label in variants]

    monkeypatch.setattr(comparison, "measure_all", measure_all)
    return asked


def test_all_combinations_of_a_few_switches_are_compared_with_none(asked):
    result = ablate(build, ["bf16", "fused", "more"])
    assert (type(result), result.name, result.baseline.label) == (Comparison, "ablation", "none")
    pairs = ["bf16 + fused", "bf16 + more", "fused + more"]
    assert [m.label for m in result] == ["none", "bf16", "fused", "more", *pairs, "bf16 + fused + more"]
    assert asked["keywords"]["none"] == {} and asked["keywords"]["bf16 + more"] == {"bf16": True, "more": True}
    assert len(ablate(build, list("abcde"))) == 2**MOST_FOR_ALL == 32


def test_of_more_switches_each_alone_the_stack_and_each_left_out(asked):
    ablate(build, list("abcdef"))
    alone, stack = ["a", "b", "c", "d", "e", "f"], ["ab", "abc", "abcd"]
    left_out = ["abcde", "abcdf", "abcef", "abdef", "acdef", "bcdef"]  # the first is of the stack, too
    assert list(asked["keywords"]) == ["none", *(" + ".join(on) for on in (*alone, *stack, *left_out, "abcdef"))]
    assert asked["keywords"]["a + c + d + e + f"] == dict.fromkeys("acdef", True)


def test_a_mapping_gives_the_values_and_items_may_be_a_function_of_them(asked):
    result = ablate(build, {"batch": 3, "fused": True}, items=lambda batch=1, fused=False: batch, unit="rows")
    assert asked["keywords"]["batch + fused"] == {"batch": 3, "fused": True}
    items = {"none": 1, "batch": 3, "fused": 1, "batch + fused": 3}
    assert {m.label: m.items for m in result} == items and result.baseline.unit == "rows"


def test_options_are_those_of_compare_without_energy_unless_it_is_asked_for(asked):
    predicted = {"a + b": {"time": 0.4}}
    result = ablate(build, ["a", "b"], name="mine", seconds=3, predicted=predicted, min_effect=0.02)
    assert (result.name, result.predicted, result.min_effect) == ("mine", predicted, 0.02)
    assert (asked["options"]["seconds"], asked["options"]["energy"]) == (3, False)
    ablate(build, ["a"], energy=True)
    assert asked["options"]["energy"]


def test_out_of_memory_is_a_result():
    def build(small=False, idle=False):
        return lambda: torch.empty((1 if small else 20) * MiB, dtype=torch.uint8)

    with memory_limit(15 * MiB):
        result = ablate(build, ["small", "idle"], seconds=0.001)
    assert [m.label for m in result if m.failed == OUT_OF_MEMORY] == ["none", "idle"]
    assert result["small"].peak_allocated == MiB and result.verdict("small") == BASELINE_FAILED


def sound(a=False, b=False):
    return lambda: None


@pytest.mark.parametrize(
    ("build", "switches", "error", "message"),
    [
        (sound, [], ValueError, r"switches: expected at least one of build's keywords, .* got \[\]"),
        (sound, "ab", TypeError, "switches: expected names of build's keywords, or a mapping of them, got 'ab'"),
        (sound, {"a", "b"}, TypeError, "switches: expected names of build's keywords, or a mapping of them, got {"),
        (lambda **on: sound(), ["none"], ValueError, r"keywords, not 'none', got \['none'\]"),
        (sound, ["a", "c"], TypeError, "takes the switches as keywords: got an unexpected keyword argument 'c'"),
        (lambda width: sound(), ["width"], TypeError, "takes the switches as keywords: missing a required .*'width'"),
        (lambda a=True: sound(), ["a"], ValueError, "expected 'a' to be off by default, build has True by default"),
        (lambda batch=8: sound(), {"batch": 8}, ValueError, "expected 'batch' to be off by default, build has 8"),
        (torch.nn.Linear(1, 1), ["a"], TypeError, "build: expected a function that returns a training step, got Lin"),
        (lambda a=False: None if a else sound(), ["a"], TypeError, "expected it to return its training step"),
    ],
)
def test_bad_arguments_are_named(build, switches, error, message):
    with pytest.raises(error, match=message):
        ablate(build, switches, seconds=0.001)


def test_items_of_other_keywords_are_named_before_anything_is_built():
    with pytest.raises(TypeError, match="positional argument: 'n'"):
        ablate(lambda a=False: pytest.fail("built"), ["a"], items=lambda n: n)
