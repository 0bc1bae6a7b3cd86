"""Tests of effgpu.measuring.variants: variants take turns, each with its own switches, and all of it is freed."""

import os
import subprocess
import sys
import traceback
import weakref
from functools import partial
from itertools import count, cycle
from operator import call

import pytest
import torch
from torch.backends import cudnn, mkldnn
from torch.backends.cuda import matmul

from effgpu import compare, count_flops, saved_bytes, trace
from effgpu.measuring import variants
from effgpu.measuring.variants import BuiltVariants, check_variants, run_variant


class Watched:
    """A variant whose model is watched: `alive` says whether any that it built still is."""

    def __init__(self, fault=lambda: None, build_fault=lambda: None):
        self.models, self.fault, self.build_fault = [], fault, build_fault

    @property
    def alive(self):
        return any(model() is not None for model in self.models)

    def __call__(self):
        model, fault = torch.nn.Linear(8, 8), self.fault
        self.models.append(weakref.ref(model))
        self.build_fault()

        def step():
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            fault()
            return loss

        return step


def fail():
    raise RuntimeError("a fault")


def interrupt():
    raise KeyboardInterrupt


def run_out_of_memory():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise torch.OutOfMemoryError("out of memory") from error


def test_returns_what_the_action_makes_of_the_step_and_frees_the_rest():
    watched = Watched()
    assert run_variant(watched, lambda step: (step().shape, watched.alive)) == (torch.Size([]), True)
    assert len(watched.models) == 1 and not watched.alive


@pytest.mark.parametrize(
    ("fault", "error", "line"),
    [
        (run_out_of_memory, torch.OutOfMemoryError, 'raise KeyError("first")'),
        (interrupt, KeyboardInterrupt, "raise KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("place", ["build_fault", "fault", "action"])
def test_out_of_memory_and_an_interrupt_free_all_that_is_built_although_the_error_is_kept(place, fault, error, line):
    sound = Watched()
    faulty = Watched() if place == "action" else Watched(**{place: fault})
    with BuiltVariants({"sound": sound, "faulty": faulty}) as built:
        built.turn("sound", call)
        with pytest.raises(error) as caught:
            built.turn("faulty", lambda step: fault() if place == "action" else step())
        assert faulty.models and not faulty.alive and not sound.alive
        built.turn("sound", call)
        assert len(sound.models) == 2, "what was freed is built again"
    assert line in "".join(traceback.format_exception(caught.value)), "the line that failed"


@pytest.mark.parametrize("cyclic", [False, True])
def test_errors_that_the_caller_handles_or_that_refer_to_each_other_do_no_harm(cyclic):
    def fault():
        first = torch.OutOfMemoryError("first")
        try:
            raise RuntimeError("second") from first if cyclic else None
        except RuntimeError as second:
            raise first from second if cyclic else None

    try:
        fail()
    except RuntimeError as handled:
        with pytest.raises(torch.OutOfMemoryError, match="first"):
            run_variant(Watched(fault), call)
        assert traceback.extract_tb(handled.__traceback__)[-1].name == "fail"


def test_a_gpu_that_has_failed_does_not_hide_the_fault(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(variants, "release_memory", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        run_variant(fail, call)


@pytest.mark.parametrize(
    ("variants", "error", "message"),
    [
        ([fail], TypeError, "variants: expected a mapping of labels to functions, got list"),
        ({}, ValueError, "variants: expected at least one labelled function, got an empty mapping"),
        ({" ": fail}, TypeError, "variants: expected every label to be a non-empty string, got ' '"),
        ({"a": fail, "b": 5}, TypeError, r"variants\['b'\]: expected a function that returns a training step, got int"),
    ],
)
def test_variants_that_are_none(variants, error, message):
    with pytest.raises(error, match=message):
        check_variants(variants)


def test_a_switch_that_a_step_sets_in_a_later_turn_is_in_force_in_its_own_later_turns_only():
    n, seen = torch.get_num_threads(), {"a": [], "b": []}

    def action(label, threads, _):
        seen[label].append(torch.get_num_threads())
        torch.set_num_threads(threads or seen[label][-1])

    with BuiltVariants(dict.fromkeys("ab", lambda: fail)) as built:
        for label, threads in [("a", 0), ("a", n + 1), ("b", 0), ("a", n + 2), ("b", 0), ("a", n), ("a", 0)]:
            built.turn(label, partial(action, label, threads))
            assert torch.get_num_threads() == n
    assert seen == {"a": [n, n, n + 1, n + 2, n], "b": [n, n]}


# Compiled variants


@pytest.fixture
def compiler():
    """A backend of torch.compile that runs eagerly, and notes of each graph that it gets whether a size is dynamic."""

    def backend(graph, inputs):
        sizes = [size for each in inputs for size in getattr(each, "shape", [each])]
        backend.dynamic.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph.forward

    backend.dynamic = []
    torch.compiler.reset()
    yield backend
    torch.compiler.reset()


def compiled_variant(compiler, *batches):
    """A variant whose step takes the next of these batch sizes, again and again."""

    def build():
        compiled, sizes = torch.compile(torch.nn.Linear(4, 4), backend=compiler), cycle(batches)
        return lambda: compiled(torch.ones(next(sizes), 4)).sum().backward()

    return build


@pytest.mark.parametrize(
    ("batches", "order", "dynamic"),
    [([8], "abba", [False, False]), ([8, 12, 16, 20], "abaa", [False, False, True])],
    ids=["of other batch sizes", "that changes its own"],
)
def test_each_variant_gets_the_graphs_that_it_would_get_alone(batches, order, dynamic, compiler):
    """Another variant's batch size makes no graph dynamic, but a variant that changes its own gets a dynamic one."""
    with BuiltVariants({"a": compiled_variant(compiler, *batches), "b": compiled_variant(compiler, 6)}) as built:
        for label in order:
            built.turn(label, call)
    assert compiler.dynamic == dynamic


def test_a_function_that_each_build_compiles_is_compiled_however_many_builds_there_are(compiler):
    """Past its limit of compilations torch.compile would run it eagerly, and later variants would measure that."""
    builds = count()

    def each_time():
        number = next(builds)
        return torch.compile(lambda: number * torch.ones(1), backend=compiler)

    limit = torch._dynamo.config.recompile_limit
    labels = [str(number) for number in range(limit + 4)]
    with BuiltVariants(dict.fromkeys(labels, each_time)) as built:
        for label in labels:
            built.turn(label, call)
    assert len(compiler.dynamic) == limit + 4 and torch._dynamo.config.recompile_limit == limit


# What a variant may not leave behind


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        (lambda: torch.empty(0).device, lambda: torch.set_default_device("meta")),
        (torch.get_default_device, lambda: torch.set_default_device("meta")),
        (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
        (torch.get_deterministic_debug_mode, lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        (partial(torch.is_autocast_enabled, "cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
        (partial(torch.get_autocast_dtype, "cuda"), lambda: torch.set_autocast_dtype("cuda", torch.bfloat16)),
        (torch.backends.cuda.flash_sdp_enabled, lambda: torch.backends.cuda.enable_flash_sdp(False)),
        (torch.backends.cuda.math_sdp_enabled, lambda: torch.backends.cuda.enable_math_sdp(False)),
        (lambda: cudnn.enabled, lambda: setattr(cudnn, "enabled", False)),
        (lambda: cudnn.benchmark, lambda: setattr(cudnn, "benchmark", True)),
        (lambda: cudnn.deterministic, lambda: setattr(cudnn, "deterministic", True)),
        (lambda: mkldnn.enabled, lambda: setattr(mkldnn, "enabled", False)),
        (lambda: matmul.allow_fp16_accumulation, lambda: setattr(matmul, "allow_fp16_accumulation", True)),
        (
            lambda: matmul.allow_fp16_reduced_precision_reduction,
            lambda: setattr(matmul, "allow_fp16_reduced_precision_reduction", False),
        ),
        (
            lambda: matmul.allow_bf16_reduced_precision_reduction,
            lambda: setattr(matmul, "allow_bf16_reduced_precision_reduction", False),
        ),
        pytest.param(
            lambda: matmul.allow_bf16_reduced_precision_reduction_split_k,
            lambda: setattr(matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
            marks=pytest.mark.skipif(
                not hasattr(matmul, "allow_bf16_reduced_precision_reduction_split_k"), reason="PyTorch before 2.10"
            ),
        ),
        (
            torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
            lambda: torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
        ),
        (
            torch.backends.cuda.preferred_blas_library,
            lambda: torch.backends.cuda.preferred_blas_library("cublaslt"),
        ),
        (
            torch.backends.cuda.preferred_linalg_library,
            lambda: torch.backends.cuda.preferred_linalg_library("cusolver"),
        ),
    ],
)
def test_switches_of_the_whole_process_are_in_force_in_the_turns_of_their_own_variant_only(read, change):
    def variant():
        change()
        return read

    before = read()
    with BuiltVariants({"changed": variant, "plain": lambda: read}) as built:
        first = built.turn("changed", call)
        assert first != before == read()
        for label, expected in [("plain", before), ("changed", first), ("plain", before), ("changed", first)]:
            assert built.turn(label, call) == expected
            assert read() == before


TF32 = """
import gc, torch, warnings
from effgpu.measuring.variants import BuiltVariants
warnings.simplefilter("ignore")
gc.freeze()
kinds = ["", ".cuda.matmul", ".cudnn", ".cudnn.conv", ".cudnn.rnn", ".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn"]
ways = ["set_float32_matmul_precision('high')", "backends.cudnn.allow_tf32 = False"]
ways += [f"backends{kind}.fp32_precision = '{to}'" for to in ("tf32", "ieee") for kind in kinds]

def read():
    try:
        older = [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    except RuntimeError:  # once the newer way was used
        older = []
    return str(older + [eval("torch.backends" + kind).fp32_precision for kind in kinds])

def variant():
    exec("torch." + way)
    return read

way = "backends.fp32_precision = 'tf32'"
torch.backends.fp32_precision = "ieee"
with BuiltVariants({"set": variant}) as built:
    built.turn("set", lambda step: step())
torch.backends.fp32_precision = "tf32"
assert read().count("tf32") == len(kinds), "what inherited still does"
torch.backends.fp32_precision = "none"

changed = 0
for way in ways:
    before = read()
    with BuiltVariants({"set": variant, "plain": lambda: read}) as built:
        turns = [(built.turn(label, lambda step: step()), read()) for label in ["set", "plain", "set", "set", "plain"]]
    inside, outside = zip(*turns)
    assert inside[0] == inside[2] == inside[3] and before == inside[1] == inside[4], (way, before, turns)
    assert {*outside, read()} == {before}, (way, before, turns)
    changed += inside[0] != before
assert changed > len(ways) / 2
with torch.backends.cudnn.flags():
    pass
"""


def test_tf32_is_set_back_whichever_way_it_was_asked_for():
    """In a process of its own, in which no other test has asked for TF32."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", TF32], env=environment, check=True)


# A step that is none


def generator():
    yield


async def coroutine():
    pass


@pytest.mark.parametrize("step", [generator, coroutine, lambda: generator, lambda: partial(print)])
def test_a_step_that_does_nothing_when_called_is_refused(step, recwarn):
    for look in (trace, lambda variant: saved_bytes(variant()), lambda variant: count_flops(variant())):
        with pytest.raises(TypeError, match="step: expected a training step that does its work when called, got a "):
            look(lambda: step)
    assert not [one for one in recwarn if "never awaited" in str(one.message)]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (None, "variant: expected a function that builds and returns a training step, got NoneType"),
        (lambda: torch.nn.Linear(2, 2), "expected it to return its training step, a function, got Linear"),
        (coroutine, "variant 'coroutine': expected it to return its training step, a function, got coroutine"),
    ],
)
def test_what_is_no_variant_is_refused(variant, message, recwarn):
    with pytest.raises(TypeError, match=message):
        trace(variant)
    assert not [one for one in recwarn if "never awaited" in str(one.message)]


def test_a_step_that_runs_out_of_data_says_so():
    batches = iter([torch.ones(1)] * 20)
    with pytest.raises(RuntimeError, match="the step ran out of data"):
        compare({"a": lambda: lambda: next(batches)}, seconds=1)


def test_a_variant_that_changes_the_current_gpu_is_refused(simulate_gpu, monkeypatch):
    """What it holds would be looked for on the GPU from before."""
    simulate_gpu()
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: current.__setitem__(0, gpu))

    def variant():
        torch.cuda.set_device(1)
        return lambda: None

    with pytest.raises(ValueError, match=r"must not change the current GPU: call torch.cuda.set_device\(1\) before"):
        run_variant(variant, call)
    assert current == [0]
