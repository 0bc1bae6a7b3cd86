"""Tests of effgpu.variants: variants take turns, each with its own switches; whatever happens, all of it is freed."""

import importlib
import multiprocessing
import os
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

from effgpu import compare, count_flops, saved_bytes, trace
from effgpu.measuring import variants
from effgpu.measuring.device import gc_frozen
from effgpu.measuring.variants import Stage, check_variants, run_variant


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts():
    """Also where the tests run in the background, and Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _fast_collections():
    """What was there before the tests, a large compiler included, need not be looked at in every collection."""
    importlib.import_module("torch._dynamo")
    with gc_frozen():
        yield


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
    assert run_variant(watched, lambda step: (step().shape, watched.alive)) == (torch.Size([]), True)
    assert len(watched.models) == 1 and not watched.alive


@with_each_fault
def test_frees_everything_when_the_step_fails_although_the_error_is_kept(fault, error):
    watched = Watched(fault)
    with pytest.raises(error) as caught:
        run_variant(watched, run)
    assert watched.models and not watched.alive
    assert isinstance(caught.value, error)


@with_each_fault
def test_frees_everything_when_the_build_fails(fault, error):
    watched = Watched(build_fault=fault)
    with pytest.raises(error) as caught:
        run_variant(watched, run)
    assert watched.models and not watched.alive
    del caught


def test_frees_everything_when_the_action_fails():
    watched = Watched()

    def act(step):
        kept = step
        fail()
        return kept

    with pytest.raises(RuntimeError) as caught:
        run_variant(watched, act)
    assert watched.models and not watched.alive
    del caught


def test_a_gpu_that_has_failed_does_not_hide_the_fault(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def variant():
        raise ValueError("the fault")

    monkeypatch.setattr(variants, "release_memory", broken)
    with pytest.raises(ValueError, match="the fault"):
        run_variant(variant, lambda step: step())


def test_frees_what_an_error_that_was_turned_into_another_held():
    watched = Watched(fail)

    def act(step):
        try:
            step()
        except RuntimeError:
            raise ValueError("another") from OSError("a cause that holds nothing")

    with pytest.raises(ValueError, match="another") as caught:
        run_variant(watched, act)
    assert isinstance(caught.value.__context__, RuntimeError)
    assert watched.models and not watched.alive


def test_the_error_still_tells_the_line_that_failed():
    with pytest.raises(RuntimeError) as caught:
        run_variant(Watched(fail_from_a_cause), run)
    told = "".join(traceback.format_exception(caught.value))
    assert "in fail_from_a_cause" in told and 'raise KeyError("first")' in told and "test_variants.py" in told


def test_the_error_that_the_caller_is_handling_keeps_its_traceback():
    try:
        fail()
    except RuntimeError as handled:
        with pytest.raises(KeyboardInterrupt):
            run_variant(Watched(interrupt), run)
        assert traceback.extract_tb(handled.__traceback__)[-1].name == "fail"


def test_errors_that_refer_to_each_other_are_taken_once():
    def fault():
        first, second = RuntimeError("first"), RuntimeError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    with pytest.raises(RuntimeError, match="first"):
        run_variant(Watched(fault), run)


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
            run_variant(loading, run)
        assert caught.value.__notes__
    else:
        run_variant(loading, run)
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("result", [None, 3, torch.zeros(1)])
def test_a_variant_that_returns_no_step_is_named(result):
    def forgetful():
        return result

    with pytest.raises(TypeError, match=r"variant 'forgetful': expected it to return its training step, a function"):
        run_variant(forgetful, run)


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


# Taking turns


def run_turns(stage, labels, action=run):
    return [stage.turn(label, action) for label in labels]


def test_a_variant_is_built_and_prepared_in_its_first_turn_and_kept():
    told = []

    def make(label):
        return lambda: told.append(f"build {label}") or (lambda: told.append(f"step {label}"))

    with Stage({"a": make("a"), "b": make("b")}, prepare=lambda label, step: told.append(f"prepare {label}")) as stage:
        assert told == []
        run_turns(stage, "abba")
    first = [f"{what} {label}" for label in "ab" for what in ("build", "prepare", "step")]
    assert told == [*first, "step b", "step a"]


def test_what_is_prepared_is_the_step_of_the_label():
    steps, prepared = {"a": lambda: 1, "b": lambda: 2}, {}
    with Stage({label: lambda step=step: step for label, step in steps.items()}, prepare=prepared.__setitem__) as stage:
        assert run_turns(stage, "ab") == [1, 2]
    assert prepared == steps


def test_variants_are_alive_together_until_the_end():
    both = {"a": Watched(), "b": Watched()}
    with Stage(both) as stage:
        run_turns(stage, "ab")
        assert both["a"].alive and both["b"].alive
    assert not both["a"].alive and not both["b"].alive


def test_without_keeping_one_is_alive_at_a_time_and_turns_in_a_row_share_a_build():
    both = {"a": Watched(), "b": Watched()}
    with Stage(both, keep=False) as stage:
        for label, builds in [("a", 1), ("b", 1), ("b", 1), ("a", 2), ("a", 2), ("b", 2)]:
            stage.turn(label, run)
            assert [name for name in both if both[name].alive] == [label]
            assert len(both[label].models) == builds
    assert not both["a"].alive and not both["b"].alive


@with_each_fault
@pytest.mark.parametrize("place", ["build", "prepare", "step", "action"])
def test_a_fault_in_any_place_frees_all_that_is_built(place, fault, error):
    sound, faulty = Watched(), Watched()
    faulty.fault = fault if place == "step" else None
    faulty.build_fault = fault if place == "build" else None

    def at(where):
        return lambda *given: fault() if place == where and faulty.alive else given[-1]()

    with Stage({"sound": sound, "faulty": faulty}, prepare=at("prepare")) as stage:
        stage.turn("sound", run)
        with pytest.raises(error) as caught:
            stage.turn("faulty", at("action"))
        assert faulty.models and not faulty.alive and not sound.alive
        stage.turn("sound", run)
        assert len(sound.models) == 2, "what was freed is built again"
    assert not sound.alive and caught.value.__notes__


def test_what_a_failed_build_leaves_to_the_garbage_collector_is_collected():
    models = []

    def variant():
        model = torch.nn.Linear(2, 2)
        model.itself = [model]
        models.append(weakref.ref(model))
        fail()

    with pytest.raises(RuntimeError, match="a fault"):
        run_variant(variant, run)
    assert models[0]() is None


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


def test_a_rebuilt_variant_starts_with_no_switches_set():
    before = torch.get_num_threads()

    def one_more():
        torch.set_num_threads(torch.get_num_threads() + 1)
        return read_threads

    with Stage({"a": one_more, "b": lambda: read_threads}, keep=False) as stage:
        assert run_turns(stage, "aabbaab") == [before + on for on in (1, 1, 0, 0, 1, 1, 0)]
    assert torch.get_num_threads() == before


# Compiled variants


class Compiler:
    """A backend of torch.compile that runs eagerly and notes the graphs that it gets."""

    def __init__(self):
        self.graphs, self.dynamic = [], []

    def __call__(self, graph, inputs):
        self.graphs.append(weakref.ref(graph))
        self.dynamic.append(any(isinstance(size, torch.SymInt) for i in inputs for size in getattr(i, "shape", [i])))
        return graph.forward

    @property
    def alive(self):
        return [graph() for graph in self.graphs if graph() is not None]


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield Compiler()
    torch.compiler.reset()


def compiled_variant(compiler, batch, models=None):
    def build():
        model = torch.nn.Linear(4, 4)
        models.append(weakref.ref(model)) if models is not None else None
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


def test_shapes_that_were_seen_outside_are_the_outside_s_again(compiler):
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend=compiler)
    compiled(torch.ones(8, 4))
    stage = Stage({"a": compiled_variant(compiler, 6)})
    stage.turn("a", run)
    compiled(torch.ones(10, 4))
    assert compiler.dynamic == [False, False, True]
    stage.clear()


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_compiled_outlives_the_variants(keep, compiler):
    models = []
    variants = {"a": compiled_variant(compiler, 8, models), "b": compiled_variant(compiler, 16, models)}
    with Stage(variants, keep=keep) as stage:
        run_turns(stage, "abba")
        assert len(compiler.alive) == 1 + keep, "graphs of what was freed"
    assert compiler.alive == [] and [model() for model in models] == [None] * len(models)


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


def test_settings_of_the_compiler_are_in_force_while_a_variant_compiles_and_then_set_back(compiler):
    config = importlib.import_module("torch._dynamo.config")
    before, seen = config.capture_scalar_outputs, []

    def variant():
        config.capture_scalar_outputs = not before
        return lambda: seen.append(config.capture_scalar_outputs)

    run_variant(variant, run)  # as the memory is measured: the first step is the action's
    assert seen == [not before] and config.capture_scalar_outputs == before
    with Stage({"a": variant, "b": lambda: run_nothing}, prepare=lambda label, step: step()) as stage:
        stage.turn("a", id)
        assert seen == [not before] * 2 and config.capture_scalar_outputs == before
        stage.turn("b", run)
        assert config.capture_scalar_outputs == before


def run_nothing():
    pass


def test_settings_of_a_compiler_that_the_variant_itself_loads_are_set_back():
    """In a process of its own, where nobody has loaded it."""
    alone = """
import sys, torch
from effgpu.measuring.variants import run_variant
def variant():
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.allowed_functions_module_string_ignorelist = {"a"}
    return lambda: None
assert "torch._dynamo.config" not in sys.modules
run_variant(variant, lambda step: step())
config = torch._dynamo.config
print(config.capture_scalar_outputs, "a" in config.allowed_functions_module_string_ignorelist)
"""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run([sys.executable, "-c", alone], env=environment, capture_output=True, text=True)
    assert told.returncode == 0 and told.stdout.split() == ["False", "False"], told


# What a variant may not leave behind


def setting(holder, name, value):
    """How a switch is read, and how it is changed."""
    return (lambda: getattr(holder, name)), (lambda: setattr(holder, name, value))


with_each_switch = pytest.mark.parametrize(
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


@with_each_switch
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
        run_variant(variant, lambda step: step())
    assert read() == before


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


def test_what_pytorch_decides_once_at_the_first_attention_is_decided_for_all_variants():
    """Some GPUs prefer cuDNN's kernel: PyTorch finds that out once. Set back, other variants would take another one."""
    before = torch._C._get_sdp_priority_order()
    decided = [*before[1:], before[0]]
    try:
        run_variant(lambda: lambda: torch._C._set_sdp_priority_order(decided), lambda step: step())
        assert torch._C._get_sdp_priority_order() == decided
    finally:
        torch._C._set_sdp_priority_order(before)


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
        run_variant(variant, lambda step: step())
        assert not before and not getattr(config, "deterministic", False)
        assert torch.get_deterministic_debug_mode() == (mode == "warn")
    finally:
        torch.use_deterministic_algorithms(False)


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
        run_variant(variant, in_a_generator)
    with pytest.raises(RuntimeError, match="the step ran out of data") as kept:
        list(map(lambda _: compare({"a": variant}, seconds=1), range(3)))
    assert kept.value.__cause__ is not None and [model() for model in models] == [None] * len(models)
