"""Profilers of a script's, which record nothing in a walk: they would see fake tensors, and slow each operation."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.autograd import profiler as older
from torch.autograd.profiler_util import EventList

from effgpu.predicting.hardware import gives

_OLDER = "__exit__ toggle_collection_dynamic"
_NEWER = """stop step prepare_trace start_trace stop_trace add_metadata add_metadata_json preset_metadata_json
toggle_collection_dynamic"""
_EXPORTS = "export_chrome_trace", "export_stacks", "export_memory_timeline"
_NO_TRACE = '{"traceEvents": []}'


def recording_nothing() -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there): a profiler begins, steps and ends, and has seen no event."""
    newer = torch.profiler.profile

    def start(profiler: newer) -> None:
        profiler.profiler = older.profile()

    yield newer, "start", start
    yield older.profile, "__enter__", lambda profiler: profiler
    yield older.profile, "function_events", property(lambda _: EventList())
    yield older.profile, "self_cpu_time_total", property(lambda _: 0)
    yield older.profile, "table", gives("")
    yield older.profile, "total_average", lambda _: EventList().total_average()
    for kind, names in ((newer, _NEWER), (older.profile, _OLDER)):
        yield from ((kind, name, gives(None)) for name in names.split())
        yield from ((kind, name, _export) for name in _EXPORTS)
        yield from ((kind, name, lambda *_, **__: EventList()) for name in ("events", "key_averages"))
    for kind in (older.emit_nvtx, older.emit_itt):
        yield kind, "__enter__", lambda emitter: emitter
        yield kind, "__exit__", gives(None)
    for module in (torch.cuda.nvtx, torch.profiler.itt):
        names = "mark", "range_push", "range_pop", "range_start", "range_end"
        yield from ((module, name, gives(0)) for name in names)
    runtime = SimpleNamespace(cudaProfilerStart=gives(0), cudaProfilerStop=gives(0))
    yield torch.cuda, "cudart", gives(runtime)
    yield torch.cuda, "check_error", gives(None)
    for name in ("start", "stop"):
        yield torch.cuda.profiler, name, gives(None)


def _export(_: object, path: str, *__: object, **___: object) -> None:
    Path(path).write_text(_NO_TRACE)
