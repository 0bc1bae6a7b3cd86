"""Tests of effgpu.variants: whatever happens to a step, its model and its DataLoader's workers are gone."""

import importlib
import multiprocessing
import signal
import subprocess
import sys
import traceback
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from effgpu import compare, count_flops, saved_bytes, trace, variants
from effgpu.variants import check_variants, use


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts():
    """Also where the tests run in the background, and Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    signal.raise_signal(signal.SIGINT)


def fail_from_a_cause():
    try:
        raise KeyError("first")
    except KeyError as error:
        raise RuntimeError("a fault") from error


def fail_as_a_group():
    raise ExceptionGroup("a fault", [RuntimeError("one")])


FAULTS = {
    fail: RuntimeError,
    interrupt: KeyboardInterrupt,
    fail_from_a_cause: RuntimeError,
    fail_as_a_group: ExceptionGroup,
}
with_each_fault = pytest.mark.parametrize(("fault", "error"), FAULTS.items(), ids=lambda f: f.__name__)


def test_returns_what_the_action_makes_of_the_step_and_frees_the_rest():
    watched = Watched()
    assert use(watched, lambda step: (step().shape, watched.alive)) == (torch.Size([]), True)
    assert len(watched.models) == 1 and not watched.alive


@with_each_fault
def test_frees_everything_when_the_step_fails_although_the_error_is_kept(fault, error):
    watched = Watched(fault)
    with pytest.raises(error) as caught:
        use(watched, run)
    assert watched.models and not watched.alive
    assert isinstance(caught.value, error)


@with_each_fault
def test_frees_everything_when_the_build_fails(fault, error):
    watched = Watched(build_fault=fault)
    with pytest.raises(error) as caught:
        use(watched, run)
    assert watched.models and not watched.alive
    del caught


def test_frees_everything_when_the_action_fails():
    watched = Watched()

    def act(step):
        kept = step
        fail()
        return kept

    with pytest.raises(RuntimeError) as caught:
        use(watched, act)
    assert watched.models and not watched.alive
    del caught


def test_a_gpu_that_has_failed_does_not_hide_the_fault(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def variant():
        raise ValueError("the fault")

    monkeypatch.setattr(variants, "release_memory", broken)
    with pytest.raises(ValueError, match="the fault"):
        use(variant, lambda step: step())


def test_frees_what_an_error_that_was_turned_into_another_held():
    watched = Watched(fail)

    def act(step):
        try:
            step()
        except RuntimeError:
            raise ValueError("another") from OSError("a cause that holds nothing")

    with pytest.raises(ValueError, match="another") as caught:
        use(watched, act)
    assert isinstance(caught.value.__context__, RuntimeError)
    assert watched.models and not watched.alive


def test_the_error_still_tells_the_line_that_failed():
    with pytest.raises(RuntimeError) as caught:
        use(Watched(fail_from_a_cause), run)
    told = "".join(traceback.format_exception(caught.value))
    assert "in fail_from_a_cause" in told and 'raise KeyError("first")' in told and "test_variants.py" in told


def test_the_error_that_the_caller_is_handling_keeps_its_traceback():
    try:
        fail()
    except RuntimeError as handled:
        with pytest.raises(KeyboardInterrupt):
            use(Watched(interrupt), run)
        assert traceback.extract_tb(handled.__traceback__)[-1].name == "fail"


def test_errors_that_refer_to_each_other_are_taken_once():
    def fault():
        first, second = RuntimeError("first"), RuntimeError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    with pytest.raises(RuntimeError, match="first"):
        use(Watched(fault), run)


@pytest.mark.parametrize(("fault", "error"), [(None, None), (fail, RuntimeError), (interrupt, KeyboardInterrupt)])
def test_dataloader_workers_are_gone(fault, error):
    before = set(multiprocessing.active_children())
    workers = []

    def loading():
        loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=2, persistent_workers=True)
        batches = iter(loader)

        def step():
            next(batches)
            workers.extend(set(multiprocessing.active_children()) - before)
            if fault:
                fault()

        return step

    if error:
        with pytest.raises(error) as caught:
            use(loading, run)
        assert caught.value.__notes__
    else:
        use(loading, run)
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("result", [None, 3, torch.zeros(1)])
def test_a_variant_that_returns_no_step_is_named(result):
    def forgetful():
        return result

    with pytest.raises(TypeError, match=r"variant 'forgetful': expected it to return its training step, a function"):
        use(forgetful, run)


@pytest.mark.parametrize(
    ("variants", "error", "message"),
    [
        ([fail], TypeError, "variants: expected a mapping of labels to functions, got list"),
        (fail, TypeError, "variants: expected a mapping of labels to functions, got function"),
        (None, TypeError, "variants: expected a mapping"),
        ({}, ValueError, "variants: expected at least one labelled function, got an empty mapping"),
        ({"a": fail, 3: fail}, TypeError, "variants: expected every label to be a non-empty string, got 3"),
        ({" ": fail}, TypeError, "variants: expected every label to be a non-empty string, got ' '"),
        ({"a": fail, "b": 5}, TypeError, r"variants\['b'\]: expected a function that returns a training step, got int"),
    ],
)
def test_variants_that_are_none(variants, error, message):
    with pytest.raises(error, match=message):
        check_variants(variants)


def test_variants_are_handed_back_in_their_order():
    variants = {"b": fail, "a": interrupt}
    assert list(check_variants(variants).items()) == list(variants.items())


def test_a_function_that_each_build_compiles_is_compiled_however_many_builds_there_are():
    """Past its limit of compilations torch.compile would run it eagerly, and later rounds would measure that."""
    graphs = []

    def each_time():
        @torch.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        def step():
            return each_time.build * torch.ones(1)

        each_time.build += 1
        return step

    each_time.build = 0
    torch.compiler.reset()
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 4):
        use(each_time, lambda step: step())
    assert len(graphs) == limit + 4 and torch._dynamo.config.recompile_limit == limit


# What a variant may not leave behind


def setting(holder, name, value):
    """How a switch is read, and how it is changed."""
    return (lambda: getattr(holder, name)), (lambda: setattr(holder, name, value))


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
        (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
        (lambda: torch.empty(0).device, lambda: torch.set_default_device("meta")),
        (torch.overrides._len_torch_function_stack, lambda: torch.set_default_device("meta")),
        (torch.overrides._len_torch_function_stack, lambda: torch.set_default_device("cpu")),
        (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        (torch.is_anomaly_enabled, lambda: torch.autograd.set_detect_anomaly(True)),
        (torch.are_deterministic_algorithms_enabled, lambda: torch.use_deterministic_algorithms(True)),
        (torch.get_deterministic_debug_mode, lambda: torch.set_deterministic_debug_mode("warn")),
        (torch.is_autocast_cache_enabled, lambda: torch.set_autocast_cache_enabled(False)),
        (partial(torch.is_autocast_enabled, "cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
        (partial(torch.get_autocast_dtype, "cuda"), lambda: torch.set_autocast_dtype("cuda", torch.bfloat16)),
        pytest.param(
            torch.backends.cuda.preferred_blas_library,
            lambda: torch.backends.cuda.preferred_blas_library("cublaslt"),
            marks=pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a PyTorch without CUDA"),
        ),
        pytest.param(
            torch.backends.cuda.preferred_linalg_library,
            lambda: torch.backends.cuda.preferred_linalg_library("magma"),
            marks=pytest.mark.skipif(not torch.cuda.has_magma, reason="a PyTorch without MAGMA"),
        ),
        (torch.backends.mha.get_fastpath_enabled, lambda: torch.backends.mha.set_fastpath_enabled(False)),
        (torch.backends.cuda.flash_sdp_enabled, lambda: torch.backends.cuda.enable_flash_sdp(False)),
        (torch.backends.cuda.mem_efficient_sdp_enabled, lambda: torch.backends.cuda.enable_mem_efficient_sdp(False)),
        (torch.backends.cuda.cudnn_sdp_enabled, lambda: torch.backends.cuda.enable_cudnn_sdp(False)),
        (torch.backends.cuda.math_sdp_enabled, lambda: torch.backends.cuda.enable_math_sdp(False)),
        setting(torch.utils.deterministic, "fill_uninitialized_memory", False),
        setting(torch.backends.mkldnn, "enabled", False),
        setting(torch.backends.mkldnn, "deterministic", True),
        setting(torch.backends.cudnn, "enabled", False),
        setting(torch.backends.cudnn, "benchmark", True),
        setting(torch.backends.cudnn, "benchmark_limit", 3),
        setting(torch.backends.cudnn, "deterministic", True),
        setting(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        setting(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        setting(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    ],
)
@pytest.mark.parametrize("ending", [None, ValueError])
def test_switches_of_the_whole_process_are_set_back(read, change, ending):
    def variant():
        change()
        assert read() != before
        if ending:
            raise ending
        return lambda: None

    before = read()
    with pytest.raises(ending) if ending else nullcontext():
        use(variant, lambda step: step())
    assert read() == before


@pytest.mark.parametrize("mode", ["default", "warn"])
def test_the_compiler_is_left_as_deterministic_as_it_was(mode):
    """torch.use_deterministic_algorithms sets it since PyTorch 2.11, and the debug mode does not."""

    def variant():
        torch.use_deterministic_algorithms(mode == "default")
        return lambda: None

    config = importlib.import_module("torch._inductor.config")
    torch.use_deterministic_algorithms(False)
    torch.set_deterministic_debug_mode(mode)
    before = getattr(config, "deterministic", False)
    try:
        use(variant, lambda step: step())
        assert not before and not getattr(config, "deterministic", False)
        assert torch.get_deterministic_debug_mode() == (mode == "warn")
    finally:
        torch.use_deterministic_algorithms(False)


NEWER = ("", ".cuda.matmul", ".cudnn", ".cudnn.conv", ".cudnn.rnn", ".mkldnn.matmul", ".mkldnn.conv", ".mkldnn.rnn")


@pytest.mark.parametrize(
    "ways",
    [
        ["torch.set_float32_matmul_precision('high')", "torch.backends.cudnn.allow_tf32 = False"],
        [f"torch.backends{holder}.fp32_precision = 'tf32'" for holder in NEWER],
        [f"torch.backends{holder}.fp32_precision = 'ieee'" for holder in NEWER],
    ],
)
def test_tf32_is_set_back_whichever_way_it_was_asked_for(ways):
    """In a process of its own, as the two ways do not go together."""
    alone = f"""
import warnings
import torch
from effgpu.variants import use
warnings.simplefilter("ignore")
def read():
    new = [eval("torch.backends" + holder).fp32_precision for holder in {NEWER}]
    return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, *new]
def variant():
    exec(way)
    return lambda: None
for way in {ways}:
    before = read()
    use(variant, lambda step: step())
    print(read() == before, way, before, read())
with torch.backends.cudnn.flags():
    pass
"""
    told = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
    assert told.returncode == 0 and [line[:4] for line in told.stdout.splitlines()] == ["True"] * len(ways), told


def test_a_variants_switches_do_not_slow_the_others():
    """Unless they are set back, the first one would be measured with anomaly mode, too."""

    def variant(watched):
        def build():
            torch.autograd.set_detect_anomaly(True) if watched else None
            model, batch = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20))), torch.ones(4, 8)
            return lambda: model(batch).sum().backward()

        return build

    result = compare({"plain": variant(False), "anomaly mode": variant(True)}, seconds=0.2)
    assert result.verdict("anomaly mode") == "slower"


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


def test_a_model_in_place_of_a_variant_or_its_step_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"variants\['a'\]: expected a function that returns .*, got Linear"):
        compare({"a": model})
    with pytest.raises(TypeError, match="expected it to return its training step, a function, got Linear"):
        compare({"a": lambda: model})


@pytest.mark.parametrize("wrong", [None, {"a": print}, torch.nn.Linear(2, 2)])
def test_what_is_no_variant_is_refused(wrong):
    with pytest.raises(TypeError, match="variant: expected a function that builds and returns a training step, got "):
        trace(wrong)


def test_a_step_that_runs_out_of_data_says_so():
    models = []

    def variant():
        model, batches = torch.nn.Linear(1, 1), iter([torch.ones(1)] * 20)
        models.append(weakref.ref(model))
        return lambda: model(next(batches))

    def in_a_generator(step):
        return list(step() for _ in range(30))

    with pytest.raises(RuntimeError, match="the step ran out of data"):
        use(variant, in_a_generator)
    with pytest.raises(RuntimeError, match="the step ran out of data") as kept:
        list(map(lambda _: compare({"a": variant}, seconds=1), range(3)))
    assert kept.value.__cause__ is not None and [model() for model in models] == [None] * len(models)
