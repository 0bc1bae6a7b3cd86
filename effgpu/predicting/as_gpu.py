"""A step on fake tensors, as if on a GPU: what is replaced in PyTorch while it runs, and put back afterwards."""

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import ModuleType

import torch

from effgpu.attaching.replacing import replaced
from effgpu.attaching.steps import noting_failed_steps
from effgpu.errors import CannotPredict
from effgpu.measuring.torch_internals import FakeTensor, FakeTensorMode, _len_torch_function_stack, fake_tensor
from effgpu.predicting import compiled, flex, imports, loading, profilers, quantized, ranks, triton_kernels
from effgpu.predicting.disguise import disguised
from effgpu.predicting.facts import ASSUMED
from effgpu.predicting.hardware import Asks, InUse, answering_as
from effgpu.predicting.order import Order
from effgpu.predicting.parameters import building_of_class, changing_classes, making_fakes, making_parameters
from effgpu.predicting.recorder import Recorder, is_meta
from effgpu.predicting.rules import boxes_at_once, kernels
from effgpu.predicting.threads import started_inside
from effgpu.predicting.weights import weights_without_values

_UNWRITTEN = {torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided, torch.ops.aten.empty_like}
_OF_AUTOCAST = {  # what sets something of a GPU's autocast, and what sets it of any device's
    torch.set_autocast_enabled: torch.set_autocast_enabled,
    torch.set_autocast_dtype: torch.set_autocast_dtype,
    torch.set_autocast_gpu_dtype: torch.set_autocast_dtype,
}
_ELSEWHERE = "a thread from before works on the step's tensors: let the variant start its threads, or its pool of them"


class _Fakes(FakeTensorMode):
    """The mode that a fake tensor belongs to. A copy, with the objects in C that it remembers, corrupts memory."""

    over = False  # whether the walk is: a thread that it has started may live on

    def __init__(self, threads: set[int], **options: bool):
        super().__init__(**options)
        self.threads = threads

    def dispatch(self, func, types, args=(), kwargs=None):
        """What an operation gives. Nobody knows what stands in memory that a known tensor's like has just got."""
        if self.over:
            return func(*args, **(kwargs or {}))
        if get_ident() not in self.threads:
            raise CannotPredict(_ELSEWHERE)
        made = super().dispatch(func, types, args, kwargs)
        if getattr(func, "overloadpacket", None) in _UNWRITTEN and isinstance(made, FakeTensor):
            made.constant = None
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> "_Fakes":
        return self


@contextlib.contextmanager
def as_gpu(recorder: Recorder, more: Iterable[tuple[object, str, object]] = ()) -> Iterator[None]:
    """Inside, tensors are fake, a GPU's rules hold, and `recorder` sees all operations. Afterwards all is as before.

    No weights are read or written, and there is one rank. `more` is what else is replaced.
    """
    spread, storages = [*ranks.alone()], recorder.storages
    with (
        weights_without_values(recorder),
        _registered(kernels(recorder) if recorder.capability else {}),
        _replaced(recorder),
        _Fakes(recorder.threads, allow_non_fake_inputs=True) as recorder.fakes,
        disguised(),
        _observed_by(recorder),
        answering_as(
            recorder.asked.gpu,
            Asks(
                recorder.note_capability,
                recorder.note_name,
                recorder.note_memory,
                recorder.work.wait,
                recorder.note_emptied_cache,
            ),
            InUse(*map(recorder.aside, (storages.in_use, storages.most_in_use, storages.forget_most))),
        ),
        imports.changed(
            {
                quantized.LIBRARY: functools.partial(quantized.as_on_gpu, page=recorder.page),
                flex.MODULE: functools.partial(flex.in_one_kernel, recorder),
                triton_kernels.MODULE: functools.partial(triton_kernels.left_out, recorder),
                "torch.distributed.fsdp": ranks.refusing_shards,
                "torchvision.ops.boxes": boxes_at_once,
                "transformers.utils.import_utils": _asking_anew,
                **dict.fromkeys(("torch.utils.tensorboard.writer", "tensorboardX.writer"), _drawing_no_graph),
                "transformers.trainer": functools.partial(_noting_what_train_adds, recorder),
            }
        ),
        recorder.translator(),
        imports.exchanged(ranks.imported(spread)),
        replaced([*more, *spread, *started_inside(recorder), *recorder.reading.constraints()]),
        replaced([(logging.getLogger(fake_tensor.__name__), "disabled", True)]),  # it tells of errors that are caught
        warnings.catch_warnings(),
    ):
        # to copy a module asks for its tensors' addresses, and a fake tensor has none
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextlib.contextmanager
def _observed_by(recorder: Recorder) -> Iterator[None]:
    """Inside, `recorder` sees all operations, and which tensors belong to modules and optimizers."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    build = optimizer.Optimizer.__init__

    @functools.wraps(build)
    def build_noted(built, *args, **kwargs):
        build(built, *args, **kwargs)
        recorder.optimizers.note_built(built)

    handles = [
        module.register_module_parameter_registration_hook(recorder.note_module),
        optimizer.register_optimizer_step_pre_hook(recorder.optimizers.before_step),
        optimizer.register_optimizer_step_post_hook(recorder.optimizers.after_step),
    ]
    try:
        failing = noting_failed_steps(recorder.optimizers.end_step)
        with replaced([(optimizer.Optimizer, "__init__", build_noted), failing]), recorder:
            yield
    finally:
        recorder.stop()
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _registered(kernels: dict[tuple[str, str], Callable]) -> Iterator[None]:
    """Operations have other kernels inside, and their own again after."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of PyTorch's is replaced is what we want
            for (name, key), kernel in kernels.items():
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def _replaced(recorder: Recorder) -> Iterator[None]:
    """Replace what cannot run on fake tensors."""
    values = [  # all known before the first is replaced: what stands in a place may use what stood there
        *_what_needs_a_gpu(recorder),
        *compiled.running_eagerly(recorder),
        *loading.loading_here(recorder),
        *_fake_classes(recorder),
        *profilers.recording_nothing(),
    ]
    with replaced(values):
        yield


def _what_needs_a_gpu(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    """What looks for a GPU, such as autocast. A backward pass and autocast come to the CPU that stands for the GPU."""
    from torch.cuda.amp import common
    from torch.fx import traceback

    from effgpu.measuring.torch_internals import _engine_run_backward as run_backward

    format_stack = traceback.format_stack
    run = functools.partial(Order().run, run_backward) if recorder.capability else run_backward

    def run_backward_here(*args, **kwargs):
        recorder.optimizers.begin_pass()
        with recorder.translator():  # what checkpointing runs again names a GPU, too
            result = run(*args, **kwargs)
        if kwargs.get("accumulate_grad"):  # a step may let go of them before its end
            recorder.name_owners()
        return result

    def has_bf16(including_emulation=True):
        if not including_emulation and recorder.capability >= (8, 0):
            recorder.holds_from = max(recorder.holds_from, (8, 0))
        return including_emulation or recorder.capability >= (8, 0)

    def format_stack_noted():  # what anomaly mode calls for each operation
        recorder.work.note_traceback()
        return format_stack()

    hooks_of = torch.autograd.graph.saved_tensors_hooks
    set_hooks = hooks_of.__init__

    def save_on_cpu(hooks, pin_memory=False, device_type="cuda"):
        ways = (functools.partial(way, pinned=pin_memory) for way in (recorder.send, recorder.fetch))
        set_hooks(hooks, *ways)

    @functools.wraps(set_hooks)
    def set_hooks_here(hooks, pack_hook, unpack_hook):
        def pack(tensor):
            with contextlib.nullcontext() if _len_torch_function_stack() else recorder.translator():
                return pack_hook(tensor)

        is_own = type(hooks) is not hooks_of and type(hooks).__module__.startswith("torch.")  # a checkpoint's
        set_hooks(hooks, pack_hook if is_own else pack, unpack_hook)

    yield hooks_of, "__init__", set_hooks_here  # PyTorch packs within a call, where no mode sees what that names
    yield torch.autograd.graph.save_on_cpu, "__init__", save_on_cpu
    yield torch.autograd, "_engine_run_backward", run_backward_here
    yield traceback, "format_stack", format_stack_noted
    yield from ((torch.autocast, name, method) for name, method in _autocast_on_both().items())
    yield from ((torch, name, function) for name, function in _set_autocast_on_both().items())
    yield torch, "get_device_module", inspect.unwrap(torch.get_device_module)  # it would remember a CPU's for a GPU
    yield common, "amp_definitely_not_available", lambda: False
    yield torch.cuda, "is_bf16_supported", has_bf16
    yield torch.cuda.memory, "_set_allocator_settings", lambda env: recorder.note_settings(env, "the code")
    for module in (torch.cuda, torch.cuda.memory):
        yield module, "set_per_process_memory_fraction", recorder.note_fraction


def _fake_classes(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    """Subclasses and parameters are fake tensors, too, which tell what a GPU's would; and Module.to takes them.

    Its own swaps tensors of other types, but fails where a fake tensor has a weak reference.
    """
    from effgpu.measuring.torch_internals import FakeImplCtx, _foreach_utils, _make_subclass

    yield FakeImplCtx, "new_dynamic_size", recorder.reading.choose_rows
    yield torch.nn.Module, "_apply", _apply
    yield torch.Tensor, "_make_subclass", staticmethod(making_fakes(lambda: recorder.fakes, _make_subclass))
    yield torch.Tensor, "__new__", staticmethod(building_of_class(torch.Tensor.__new__))
    yield torch.Tensor, "as_subclass", changing_classes(torch.Tensor.as_subclass)
    yield FakeTensor, "device", property(recorder.device_of)
    yield FakeTensor, "is_cuda", property(lambda fake: recorder.device_of(fake).type == "cuda")  # where no mode sees
    yield FakeTensor, "is_cpu", property(lambda fake: recorder.device_of(fake).type == "cpu")  # it: within interpolate
    yield FakeTensor, "tolist", lambda fake: recorder.reading.list(fake)
    yield FakeTensor, "layout", torch.Tensor.layout  # its own asks first whether it is of oneDNN, which none is
    yield FakeTensor, "__new__", staticmethod(making_parameters(FakeTensor.__new__))
    # clipping takes lists where all tensors are plain ones
    yield _foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, FakeTensor]


def _autocast_on_both() -> dict[str, Callable]:
    """Methods of torch.autocast: where a GPU's begins, the CPU's begins with it, which has a GPU's rules."""
    begin, end = torch.autocast.__enter__, torch.autocast.__exit__

    def begin_both(autocast):
        if autocast.device == "cuda":
            autocast.on_cpu = torch.autocast("cpu", autocast.fast_dtype, autocast._enabled, autocast._cache_enabled)
            begin(autocast.on_cpu)
        return begin(autocast)

    def end_both(autocast, *error):
        end(autocast, *error)
        if autocast.device == "cuda":
            end(autocast.on_cpu, *error)

    return {"__enter__": begin_both, "__exit__": end_both}


def _set_autocast_on_both() -> dict[str, Callable]:
    """Functions that switch autocast: what they set for a GPU, they set for the CPU that has a GPU's rules."""

    def on_both(write: Callable) -> Callable:
        def written(*args, **kwargs):
            write(*args, **kwargs)
            *device, value = sorted((*args, *kwargs.values()), key=lambda one: not isinstance(one, str))
            if torch.device(*device or ["cuda"]).type == "cuda":
                of_cpu(value)

        of_cpu = functools.partial(_OF_AUTOCAST[write], "cpu")
        return written

    return {write.__name__: on_both(write) for write in _OF_AUTOCAST}


@contextlib.contextmanager
def _asking_anew(module: ModuleType) -> Iterator[None]:
    """Inside, and after, transformers remembers nothing of the GPU that was there before: `enable_tf32` is cached."""

    def forget() -> None:
        for name, value in vars(module).items():
            if hasattr(value, "cache_clear") and ("torch" in name or "tf32" in name):
                value.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


def _drawing_no_graph(module: ModuleType) -> contextlib.AbstractContextManager:
    """Inside, a model's graph is not drawn: it is traced for that, which fake tensors cannot be."""
    return replaced([(module.SummaryWriter, "add_graph", lambda *_, **__: None)])


def _noting_what_train_adds(recorder: Recorder, module: ModuleType) -> contextlib.AbstractContextManager:
    """Inside, a Trainer's step says if it lacks the checkpointing of its arguments, which `train()` switches on."""
    train_on = module.Trainer.training_step

    @functools.wraps(train_on)
    def noted(trainer, model, *batch, **options):
        wanted = (getattr(trainer.args, f"{name}_checkpointing", False) for name in ("activation", "gradient"))
        if any(wanted) and not any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
            without = "without the gradient checkpointing of the Trainer's arguments"
            recorder.say(ASSUMED, f"{without}, which only trainer.train() switches on")
        return train_on(trainer, model, *batch, **options)

    return replaced([(module.Trainer, "training_step", noted)])


def _apply(module: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
    """nn.Module._apply, by which a module changes its device or dtype: parameters stay if they can."""
    if recurse:
        for child in module.children():
            child._apply(function)
    with torch.no_grad():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            applied = function(parameter)
            if isinstance(applied, FakeTensor) and is_meta(parameter) and not is_meta(applied):
                module._parameters[key] = torch.nn.Parameter(applied.detach(), parameter.requires_grad)
                continue
            if applied is not parameter:
                parameter.data = applied.detach()
            if parameter.grad is not None:
                parameter.grad = function(parameter.grad)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = function(buffer)
    return module
