"""Tests of effgpu.measuring.variants: variants take turns, each with its own switches, and all of it is freed."""

import gc
import os
import subprocess
import sys
import traceback
import weakref
from functools import partial

import pytest
import torch

from effgpu import compare, count_flops, saved_bytes, trace
from effgpu.measuring import variants
from effgpu.measuring.variants import Stage, check_variants, run_variant

pytestmark = pytest.mark.usefixtures("short_collections")


class Watched:
    """A variant whose model is watched: `alive` says whether any that it built still is."""

    def __init__(self, fault=None, build_fault=None):
        self.models, self.fault, self.build_fault = [], fault, build_fault

    @property
    def alive(self):
        return any(model() is not None for model in self.models)

    def __call__(self):
        model = torch.nn.Linear(8, 8)
        self.models.append(weakref.ref(model))
        if self.build_fault:
            self.build_fault()
        fault = self.fault

        def step():
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            if fault:
                fault()
            return loss

        return step


def run(step):
    return step()


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
@pytest.mark.parametrize("place", ["build", "step", "action"])
def test_out_of_memory_and_an_interrupt_free_all_that_is_built_although_the_error_is_kept(place, fault, error, line):
    sound, faulty = Watched(), Watched()
    faulty.fault = fault if place == "step" else None
    faulty.build_fault = fault if place == "build" else None

    def at(where):
        return lambda step: fault() if place == where else step()

    with Stage({"sound": sound, "faulty": faulty}) as stage:
        stage.turn("sound", run)
        with pytest.raises(error) as caught:
            stage.turn("faulty", at("action"))
        assert faulty.models and not faulty.alive and not sound.alive
        stage.turn("sound", run)
        assert len(sound.models) == 2, "what was freed is built again"
    assert line in "".join(traceback.format_exception(caught.value)), "the line that failed"


@pytest.mark.parametrize("way", ["fault", "build_fault"])
def test_another_error_keeps_its_frames_for_a_debugger_and_all_is_freed_with_it(way):
    watched = Watched(**{way: fail})
    with pytest.raises(RuntimeError, match="a fault") as caught:
        run_variant(watched, run)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"
    assert watched.alive, "%debug looks at it"
    del caught
    gc.collect()
    assert not watched.alive


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
            run_variant(Watched(fault), run)
        assert traceback.extract_tb(handled.__traceback__)[-1].name == "fail"


def test_a_gpu_that_has_failed_does_not_hide_the_fault(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def variant():
        raise ValueError("the fault")

    monkeypatch.setattr(variants, "release_memory", broken)
    with pytest.raises(ValueError, match="the fault"):
        run_variant(variant, lambda step: step())


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


# Taking turns


def run_turns(stage, labels, action=run):
    return [stage.turn(label, action) for label in labels]


def read_threads():
    return torch.get_num_threads()


def test_a_switch_that_a_step_sets_in_a_later_turn_is_in_force_in_its_own_later_turns_only():
    before, seen = torch.get_num_threads(), {"a": [], "b": []}

    def turn(label, threads=None):
        def step():
            seen[label].append(torch.get_num_threads())
            if threads:
                torch.set_num_threads(threads)

        stage.turn(label, lambda _: step())
        assert torch.get_num_threads() == before

    with Stage(dict.fromkeys("ab", lambda: read_threads)) as stage:
        turn("a")
        turn("a", before + 1)
        turn("b")
        turn("a", before + 2)
        turn("b")
        turn("a", before)  # takes it back
        turn("a")
    assert seen == {"a": [before, before, before + 1, before + 2, before], "b": [before, before]}


# Compiled variants


class Compiler:
    """A backend of torch.compile that runs eagerly and notes the graphs that it gets."""

    def __init__(self):
        self.graphs, self.dynamic = [], []

    def __call__(self, graph, inputs):
        self.graphs.append(weakref.ref(graph))
        self.dynamic.append(any(isinstance(size, torch.SymInt) for i in inputs for size in getattr(i, "shape", [i])))
        return graph.forward


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


def compiled_variant(compiler, batch):
    def build():
        model = torch.nn.Linear(4, 4)
        compiled, x = torch.compile(model, backend=compiler), torch.ones(batch, 4)
        return lambda: compiled(x).sum().backward()

    return build


def test_variants_of_other_batch_sizes_get_a_static_graph_each(compiler):
    variants = {"small": compiled_variant(compiler, 8), "large": compiled_variant(compiler, 16)}
    with Stage(variants) as stage:
        run_turns(stage, ["small", "large", "large", "small"])
        assert compiler.dynamic == [False, False], "in a process of its own, each sees one size"


def test_a_variant_that_changes_its_batch_size_gets_a_dynamic_graph_as_it_would_alone(compiler):
    def build():
        model, sizes = torch.nn.Linear(4, 4), iter([8, 12, 16, 20])
        compiled = torch.compile(model, backend=compiler)
        return lambda: compiled(torch.ones(next(sizes), 4))

    with Stage({"changing": build, "other": compiled_variant(compiler, 6)}) as stage:
        run_turns(stage, ["changing", "other", "changing", "changing"])
    assert compiler.dynamic == [False, False, True]


def test_a_function_that_each_build_compiles_is_compiled_however_many_builds_there_are(compiler):
    """Past its limit of compilations torch.compile would run it eagerly, and later variants would measure that."""
    builds = []

    def each_time():
        builds.append(len(builds))
        number = builds[-1]

        @torch.compile(backend=compiler)
        def step():
            return number * torch.ones(1)

        return step

    limit = torch._dynamo.config.recompile_limit
    labels = [str(number) for number in range(limit + 4)]
    with Stage(dict.fromkeys(labels, each_time)) as stage:
        run_turns(stage, labels)
    assert len(compiler.graphs) == limit + 4 and torch._dynamo.config.recompile_limit == limit


# What a variant may not leave behind


def flag(holder, name, value):
    """How a switch is read, and how it is changed."""
    return partial(getattr, holder, name), partial(setattr, holder, name, value)


with_each_switch = pytest.mark.parametrize(
    ("read", "change"),
    [
        (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        (lambda: torch.empty(0).device, lambda: torch.set_default_device("meta")),
        (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
        (torch.get_deterministic_debug_mode, lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        (partial(torch.is_autocast_enabled, "cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
        (partial(torch.get_autocast_dtype, "cuda"), lambda: torch.set_autocast_dtype("cuda", torch.bfloat16)),
        (torch.backends.cuda.flash_sdp_enabled, lambda: torch.backends.cuda.enable_flash_sdp(False)),
        (torch.backends.cuda.math_sdp_enabled, lambda: torch.backends.cuda.enable_math_sdp(False)),
        flag(torch.backends.cudnn, "enabled", False),
        flag(torch.backends.cudnn, "benchmark", True),
        flag(torch.backends.cudnn, "deterministic", True),
    ],
)


@with_each_switch
def test_switches_of_the_whole_process_are_in_force_in_the_turns_of_their_own_variant_only(read, change):
    def variant():
        change()
        return read

    before = read()
    with Stage({"changed": variant, "plain": lambda: read}) as stage:
        first = stage.turn("changed", run)
        assert first != before == read()
        for label, expected in [("plain", before), ("changed", first), ("plain", before), ("changed", first)]:
            assert stage.turn(label, run) == expected
            assert read() == before


NEWER = ("", ".cuda.matmul", ".cudnn", ".cudnn.conv", ".cudnn.rnn", ".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn")


@pytest.mark.parametrize(
    "ways",
    [
        ["torch.set_float32_matmul_precision('high')", "torch.backends.cudnn.allow_tf32 = False"],
        [f"torch.backends{holder}.fp32_precision = '{to}'" for to in ("tf32", "ieee") for holder in NEWER],
    ],
)
def test_tf32_is_set_back_whichever_way_it_was_asked_for(ways):
    """In a process of its own, as the two ways do not go together."""
    alone = f"""
import gc
import warnings
import torch
from effgpu.measuring.variants import Stage
warnings.simplefilter("ignore")
def read():
    new = [eval("torch.backends" + holder).fp32_precision for holder in {NEWER}]
    return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, *new]
def told():
    try:
        return read()
    except RuntimeError:  # the older way once the newer one was used
        return [eval("torch.backends" + holder).fp32_precision for holder in {NEWER}]
def variant():
    exec(way)
    return told
gc.freeze()
for way in {ways}:
    before = read()
    with Stage({{"set": variant, "plain": lambda: told}}) as stage:
        turns = [(stage.turn(label, lambda step: step()), read()) for label in ["set", "plain", "set", "set", "plain"]]
    inside, outside = zip(*turns)
    alike = inside[0] == inside[2] == inside[3] and before == inside[1] == inside[4]
    alike = alike and set(map(str, outside)) == {{str(before)}} and read() == before
    print(alike, inside[0] != before, way, before, turns)
with torch.backends.cudnn.flags():
    pass
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run([sys.executable, "-c", alone], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told
    alike, changed, *_ = zip(*map(str.split, told.stdout.splitlines()))
    assert alike == ("True",) * len(ways) and changed.count("True") > len(ways) / 2, told


# A step that is none


def generator():
    yield


async def coroutine():
    pass


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("step", [generator, coroutine, lambda: generator, lambda: partial(print)])
def test_a_step_that_does_nothing_when_called_is_refused(step):
    for look in (trace, lambda variant: saved_bytes(variant()), lambda variant: count_flops(variant())):
        with pytest.raises(TypeError, match="step: expected a training step that does its work when called, got a "):
            look(lambda: step)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (None, "variant: expected a function that builds and returns a training step, got NoneType"),
        (torch.nn.Linear(2, 2), "variant: expected a function that builds and returns a training step, got Linear"),
        (lambda: torch.nn.Linear(2, 2), "expected it to return its training step, a function, got Linear"),
    ],
)
def test_what_is_no_variant_is_refused(variant, message):
    with pytest.raises(TypeError, match=message):
        trace(variant)


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
        run_variant(variant, run)
    assert current == [0]
