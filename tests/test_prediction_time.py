"""Tests of the predicted time: the kernels of a step, how long they take, ranges, ratios, the table of GPUs."""

import csv
import math
import re
import sys
from collections import Counter
from functools import partial
from itertools import chain, repeat
from traceback import walk_stack
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from benchmarks import predictions, published_times
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from effgpu import count_flops
from effgpu.__main__ import main
from effgpu.course import workloads
from effgpu.measuring.device import multiplying_as
from effgpu.measuring.torch_internals import _engine_run_backward
from effgpu.predicting import audited, calibration
from effgpu.predicting.full_size import predict_full_size
from effgpu.predicting.gpus import TABLE, Gpu, find_gpu, known_gpus, own_table, read_table
from effgpu.predicting.kinds import ATTENTION, CONVOLUTION, KINDS, NORM, OPTIMIZER, OTHER, PRODUCT, Kernel, Segment
from effgpu.predicting.predict import predict
from effgpu.predicting.rates import kernel_seconds
from effgpu.predicting.spreads import EXTRAPOLATED, LEAST_OF_RATIOS, NINE_OF_TEN, SPREAD_OF_RATIOS, SPREAD_OF_SOURCES
from effgpu.predicting.time import LAUNCH_BOUND, MEMORY_BOUND, PRODUCTS_BOUND, step_time, time_ratio
from effgpu.predicting.timeline import COPY, Event, Timeline
from effgpu.units import GiB, MiB, format_seconds


@pytest.fixture(autouse=True)
def _own_table_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def forward(function, *shape, dtype=torch.float32):
    """A variant whose step calls a function on a tensor, without a backward pass."""

    def variant():
        x = torch.randn(shape, dtype=dtype)
        return lambda: function(x)

    return variant


def kernels(variant, gpu="A100 80 GB"):
    """The kernels of a step, each with its number."""
    return sum((segment.kernels for segment in predict(variant, gpu).segments), Counter())


def training(width=256, batch=1024, depth=2, optimizer=torch.optim.AdamW, autocast=None, **options):
    def variant():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
        trained, x = optimizer(model.parameters(), **options), torch.randn(batch, width)

        def step():
            with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(x).square().mean()
            loss.backward()
            trained.step()
            trained.zero_grad()

        return step

    return variant


# --- what is a kernel ---


def test_views_queries_and_empty_tensors_are_no_kernels():
    def look(x):
        return x.view(-1).t().unsqueeze(0).expand(4, -1), x.device, x.is_contiguous(), x.detach().chunk(2)

    assert not kernels(forward(lambda x: (look(x), torch.empty_like(x), x[:0] + 1), 16, 16))


def test_a_kernel_counts_what_it_computes_and_moves():
    (kernel,) = kernels(forward(lambda x: x + 1, 1024, 256))
    assert kernel == Kernel("add", OTHER, "fp32", 0, 2 * 4 * 1024 * 256)
    (kernel,) = kernels(forward(lambda x: x @ x, 512, 512, dtype=torch.float16))
    assert (kernel.kind, kernel.format, kernel.flops, kernel.bytes) == (PRODUCT, "fp16", 2 * 512**3, 3 * 2 * 512**2)
    assert kernel.product == (1, 512, 512, 512)


@pytest.mark.parametrize("again", [False, True])
def test_the_flops_are_those_that_pytorch_counts_also_of_what_checkpointing_computes_again(again):
    def variant():
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(128, 64, requires_grad=True)
        return lambda: (checkpoint(model, x, use_reentrant=False) if again else model(x)).sum().backward()

    flops = sum(row.flops for row in predict(variant, "T4").time().table.values())
    assert flops == count_flops(variant()) == (4 if again else 3) * 2 * 128 * 64 * 64


def test_what_asks_for_settings_after_a_functions_step_is_no_call_of_the_step():
    calls = [each["name"] for each in predict(forward(torch.relu, 8), "T4").timeline().trace()["traceEvents"]]
    assert "a view" not in calls and any("relu" in call for call in calls)


def test_fused_and_foreach_optimizers_launch_few_kernels():
    def launches(**options):
        return predict(training(depth=40, **options), "T4").time().table[OPTIMIZER].number

    fused, lists, loop = launches(fused=True), launches(), launches(foreach=False)
    assert fused <= 2 < lists < 40 < 3 * 40 <= loop
    updates = [kernel for kernel in kernels(training(foreach=False)) if kernel.kind == OPTIMIZER]
    assert all(kernel.bytes >= 1024 for kernel in updates), "what counts the steps is on the CPU"


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_], ids=["norm", "value"])
def test_gradients_are_clipped_in_lists_as_on_a_gpu(clip):
    def variant(**options):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))

        def step():
            net(torch.randn(8, 64)).sum().backward()
            clip(net.parameters(), 1.0, **options)
            net.zero_grad()

        return step

    by_itself, lists, loop = (
        kernels(partial(variant, **chosen)) for chosen in ({}, {"foreach": True}, {"foreach": False})
    )
    assert by_itself == lists and sum(by_itself.values()) + 60 < sum(loop.values())


@pytest.mark.parametrize("heads_of_keys, dtype", [(8, torch.float32), (2, torch.bfloat16)])
def test_attention_is_one_kernel_that_computes_half_where_it_is_causal(heads_of_keys, dtype):
    def variant(causal, trained):
        query, key = (torch.randn(2, heads, 256, 64, dtype=dtype) for heads in (8, heads_of_keys))
        query.requires_grad_(trained)
        attend = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=heads_of_keys < 8)
        return lambda: attend(query, key, key).sum().backward() if trained else attend(query, key, key)

    cases = (False, False), (True, False), (False, True)
    plain, causal, trained = (predict(partial(variant, *case), "L4").time().table[ATTENTION] for case in cases)
    product = 2 * 2 * 8 * 256**2 * 64
    assert (plain.number, plain.flops) == (1, 2 * product) and (causal.number, causal.flops) == (1, product)
    assert trained.flops == (2 + 5) * product


def test_a_convolution_is_the_products_that_it_comes_to():
    def variant():
        net, x = nn.Conv2d(32, 64, 3, padding=1), torch.randn(8, 32, 16, 16, requires_grad=True)
        return lambda: net(x).sum().backward()

    found = {kernel.name: kernel for kernel in kernels(variant) if kernel.name.startswith("convolution")}
    flops = 2 * 8 * 16 * 16 * 64 * 32 * 9
    products = {name: kernel for name, kernel in found.items() if kernel.kind == CONVOLUTION}
    assert set(products) == {"convolution", "convolution_backward (input)", "convolution_backward (weight)"}
    assert set(found) - set(products) == {"convolution (bias)", "convolution_backward (bias)"}
    assert all(kernel.flops == 2 * math.prod(kernel.product) == flops for kernel in products.values())


@pytest.mark.parametrize(
    ("switch", "told"),
    [
        ("enabled", "not known: how long convolutions take without cuDNN"),
        ("deterministic", "assumed: cuDNN's deterministic convolutions take as long as others"),
    ],
)
def test_a_convolution_without_cudnns_usual_algorithms_is_named(monkeypatch, switch, told):
    variant = forward(lambda images: F.conv2d(images, images), 2, 8, 16, 16)
    assert told not in str(predict(variant, "T4"))
    monkeypatch.setattr(torch.backends.cudnn, switch, not getattr(torch.backends.cudnn, switch))
    assert told in str(predict(variant, "T4")) and told not in str(predict(forward(F.gelu, 8), "T4"))


@pytest.mark.parametrize(
    "build",
    [
        partial(nn.Conv2d, 16, 32, 1, stride=2),
        partial(nn.Conv2d, 16, 32, 3, stride=2, padding=1, groups=2),
        partial(nn.Conv2d, 16, 32, 4, stride=4),
        partial(nn.Conv2d, 16, 32, 5, padding=4, dilation=2),
        partial(nn.ConvTranspose2d, 16, 32, 2, stride=2),
    ],
)
def test_each_product_of_a_convolution_computes_its_flops_and_no_zeros_that_a_stride_leaves(build):
    def variant():
        layer, images = build().cuda(), torch.rand(2, 16, 32, 32, device="cuda", requires_grad=True)
        return lambda: layer(images).sum().backward()

    products = [kernel for kernel in kernels(variant) if kernel.product]
    assert len(products) == 3
    for kernel in products:
        assert 2 * math.prod(kernel.product) == kernel.flops, kernel.name


def test_a_step_is_divided_where_the_cpu_waits():
    segments = lambda function: len(predict(forward(function, 8), "T4").segments)
    assert segments(lambda x: x.sum() + 1) == 1 and segments(lambda x: x.sum().item() + x.sum()) == 2
    gpu, kernel = find_gpu("T4"), Kernel("add", OTHER, "fp32", 0, GiB)
    one, two = (step_time([Segment(Counter({kernel: 2 // n}))] * n, gpu).expected for n in (1, 2))
    assert two - one == pytest.approx(gpu.launch + gpu.kernel), "it copies a number, and idles until it is called again"


def test_the_cpu_waits_for_each_kernel_where_launches_block(monkeypatch):
    variant, gpu = forward(lambda x: (x + 1) * 2, 1024, 1024), find_gpu("T4")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    predicted = predict(variant, "T4").time().expected
    one_by_one = (max(kernel_seconds(kernel, gpu)) + gpu.launch + gpu.kernel for kernel in kernels(variant, "T4"))
    assert predicted == pytest.approx(sum(one_by_one))


def test_steps_follow_each_other_without_a_wait():
    """So the CPU calls what follows a step's last wait while the GPU still works on what came before the next one."""
    gpu, kernel = find_gpu("T4"), Kernel("add", OTHER, "fp32", 0, GiB)
    busy, calling = Segment(Counter({kernel: 1})), Segment(calls=1000)
    assert step_time([busy], gpu).expected < 1000 * gpu.launch
    for segments in ([busy, calling], [calling, busy]):
        assert step_time(segments, gpu).expected == pytest.approx(1000 * gpu.launch + gpu.kernel)
    apart = step_time([calling, busy, calling], gpu).expected
    assert apart == pytest.approx(2000 * gpu.launch + step_time([busy], gpu).expected + gpu.launch + 2 * gpu.kernel)


@pytest.mark.parametrize("again", [False, True])
def test_anomaly_mode_keeps_as_many_tracebacks_as_on_real_tensors_and_as_deep_as_in_a_notebook(monkeypatch, again):
    def variant():
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        x = torch.randn(4, 8)

        def step():
            with torch.autograd.set_detect_anomaly(True):
                loss = (checkpoint(model, x, use_reentrant=False) if again else model(x)).sum()
                loss.backward()

        return step

    depths = []

    def keep():
        codes = [frame.f_code for frame, _ in walk_stack(sys._getframe(1))]
        engine = codes.index(_engine_run_backward.__code__) if _engine_run_backward.__code__ in codes else None
        depths.append(engine or 30 + codes.index(step.__code__) + 1)
        return []

    predicted = [round(e.traced / 0.4) for e in predict(variant, "T4").events if e.traced]
    monkeypatch.setattr(torch.fx.traceback, "format_stack", keep)
    step = variant()
    step()
    assert sum(predicted) == sum(depths) and len(depths) > 5


@pytest.mark.parametrize(
    "function, told",
    [
        (lambda x: torch.ops.aten._softmax(self=x, dim=-1, half_to_float=False), ""),
        (lambda x: torch.einsum("ij,kj->ik", x, x) @ x[0] + 1, ""),
        (lambda x: F.conv_transpose1d(x[None], torch.randn(16, 4, 3)), ""),
        (lambda x: torch.complex(x, x) @ torch.complex(x, x), ""),
        (lambda x: x.int() @ x.int(), "not known: how long products in int32 take"),
        (lambda x: torch.linalg.qr(x), "not known: how long linalg_qr computes"),
        (lambda x: x.double() @ x.double(), ""),
        (torch.ops.prims.neg, "prims::neg takes as long as reading its arguments"),
    ],
)
def test_rare_operations_are_timed_too_and_one_of_unknown_speed_is_named(function, told):
    predicted = predict(forward(function, 16, 16), "T4")
    assert predicted.time().expected > 0
    assert told in repr(predicted) and len(predicted.assumptions + predicted.unknown) == bool(told)


# --- the inputs that a time must see ---


def seconds(variant, gpu="A100 80 GB"):
    return predict(variant, gpu).time().expected


WIDE = dict(width=4096, batch=8192, depth=4)


def test_autocast_takes_the_format_that_the_gpu_multiplies_in():
    found = {kernel.format for kernel in kernels(training(autocast=torch.float16)) if kernel.kind == PRODUCT}
    assert found == {"fp16"}
    plain, half = (seconds(training(**WIDE, autocast=autocast)) for autocast in (None, torch.bfloat16))
    assert 5 < plain / half < 257 / 17


@pytest.mark.parametrize("gpu, gain", [("A100 80 GB", 3), ("T4", 0.99)])
def test_tf32_counts_where_it_is_switched_on_and_the_gpu_has_it(gpu, gain):
    plain = seconds(training(**WIDE), gpu)
    with multiplying_as("tf32"):
        fast = seconds(training(**WIDE), gpu)
    assert plain / fast > gain and (gain > 1 or plain == fast)


def convolving(last=False, dtype=torch.float16, groups=1):
    def variant():
        options = dict(dtype=dtype, memory_format=torch.channels_last if last else torch.contiguous_format)
        net = nn.Conv2d(128, 128, 3, padding=1, groups=groups, bias=False).to(**options)
        x = torch.randn(64, 128, 28, 28).to(**options)
        return lambda: net(x).sum().backward()

    return variant


def test_convolutions_have_a_switch_of_their_own():
    switch = torch.backends.cudnn.conv
    plain, before = seconds(convolving(dtype=torch.float32)), switch.fp32_precision
    switch.fp32_precision = "ieee"
    try:
        assert seconds(convolving(dtype=torch.float32)) > 1.5 * plain
    finally:
        switch.fp32_precision = before


def test_the_memory_format_counts():
    assert seconds(convolving(last=True), "RTX 3090") < 0.95 * seconds(convolving(), "RTX 3090")
    layouts = {kernel.layout for kernel in kernels(convolving(last=True)) if kernel.kind == CONVOLUTION}
    assert layouts == {"wide nhwc"}
    assert {k.layout for k in kernels(convolving(groups=128)) if k.kind == CONVOLUTION} == {"depthwise nchw"}


@pytest.mark.parametrize("dtype, slower", [(torch.bfloat16, 1.5), (torch.float32, 0.99)])
def test_tensor_cores_dislike_odd_widths(dtype, slower):
    multiply = lambda width: seconds(forward(lambda x: x @ x.T, width, width, dtype=dtype))
    assert slower < multiply(4095) / multiply(4096) < 2.2 * slower


def test_norms_are_slower_than_other_operations_and_what_fits_into_the_cache_is_faster():
    def take(kind, size):
        return kernel_seconds(Kernel("x", kind, "fp32", 0, size), find_gpu("RTX 4090"))[1]

    assert take(NORM, 800 * MiB) > 1.3 * take(OTHER, 800 * MiB) > 1.6 * 1.3 * 100 * take(OTHER, 8 * MiB)


@pytest.mark.parametrize("size", [4096, 16], ids=["bound by memory", "bound by launching"])
def test_compiled_code_has_a_range_from_fused_to_eager_and_says_so(size):
    function = lambda x: (x.exp() + 1).log().tanh()
    eager = predict(forward(function, size, size), "A100 80 GB")
    compiled = predict(forward(lambda x: torch.compile(function)(x), size, size), "A100 80 GB")
    ours, theirs = compiled.time(), eager.time()
    assert ours.high == theirs.high and ours.low < 0.5 * theirs.low and ours.low < ours.expected < theirs.expected
    assert "from perfect fusion to eager" in repr(compiled) and "fusion" not in repr(eager)
    played, _, most = compiled.timeline().range()
    assert (played, most) == pytest.approx((ours.expected, ours.high), rel=0.03), "doctor ranks the same step"


def test_a_ratio_is_the_other_one_turned_round():
    function = lambda x: (x.exp() + 1).log().tanh()
    eager = predict(forward(function, 4096, 4096), "A100 80 GB").time()
    compiled = predict(forward(lambda x: torch.compile(function)(x), 4096, 4096), "A100 80 GB").time()
    value, low, high = time_ratio(compiled, eager)
    assert time_ratio(eager, compiled) == pytest.approx((1 / value, 1 / high, 1 / low))


@pytest.mark.parametrize(
    ("gpu", "dtype", "expected"),
    [
        ("A100 80 GB", torch.float64, 2 * 4096**3 / 19.5e12),  # the data sheets' rates
        ("T4", torch.float64, 2 * 4096**3 / 0.25e12),
        ("A100 80 GB", torch.complex64, 4 * 2 * 4096**3 / 19.5e12),
    ],
)
def test_products_of_rare_numbers_take_their_own_rate(gpu, dtype, expected):
    product = forward(lambda x: x @ x.t(), 4096, 4096, dtype=dtype)
    assert seconds(product, gpu) == pytest.approx(expected, rel=0.3)


def test_a_product_with_a_vector_reads_its_matrix_once():
    matrix = 4 * 16384**2  # bytes
    assert seconds(forward(lambda x: x @ x[0], 16384, 16384)) == pytest.approx(matrix / 1.7e12, rel=0.4)
    one_column = forward(lambda x: F.linear(x, x[:1]), 65536, 4096)
    assert seconds(one_column) == pytest.approx(4 * 65536 * 4096 / 1.7e12, rel=0.4)


def test_a_convolution_with_one_channel_is_no_product_with_a_vector():
    def variant(channels):
        layer, images = nn.Conv2d(512, channels, 3, bias=False).cuda(), torch.rand(16, 512, 64, 64).cuda()
        return lambda: layer(images)

    one, two = (seconds(partial(variant, channels), "T4") for channels in (1, 2))
    assert one > 0.9 * two


def test_a_long_row_is_sorted_in_passes_with_a_second_buffer():
    rows = lambda *shape: predict(forward(lambda x: x.sort(-1)[0], *shape), "A100 80 GB")
    long, short = rows(2**24), rows(2**14, 2**10)
    assert long.time().expected > 2 * short.time().expected
    moved = [sum(row.bytes for row in one.time().table.values()) / 2**24 for one in (long, short)]
    assert moved == pytest.approx([4 + 12 + 4 * 2 * 12, 4 + 12 + 32])  # it reads and writes; passes; copies
    assert long.allocated == pytest.approx(short.allocated + 2**24 * (8 + 8 + 4), rel=0.001)


def test_distances_are_a_product_and_their_backward_pass_has_a_number_for_each_pair_and_column():
    def variant(p):
        layer, rows = nn.Linear(64, 64), torch.rand(4096, 64)
        return lambda: torch.cdist(layer(rows), rows, p=p).sum().backward()

    far = lambda p: predict(partial(variant, p), "A100 80 GB")
    assert far(2.0).time().table[PRODUCT].flops > 2 * 4096**2 * 64 and not far(2.0).unknown
    assert far(1.0).allocated > 4 * 4096**2 * 64 > far(2.0).allocated


def test_a_bag_of_embeddings_reads_its_rows_alone():
    def variant(rows):
        table, places = nn.EmbeddingBag(rows, 64), torch.randint(0, 1000, (512, 20))
        return lambda: table(places)

    few, many = (
        predict(partial(variant, rows), "A100 80 GB").time().table[OTHER].bytes for rows in (100_000, 1_000_000)
    )
    assert few == many < 2 * 4 * 64 * 512 * 21


def test_large_depthwise_kernels_compute_for_longer_than_they_read():
    def variant(size):
        layers = nn.Sequential(
            *(nn.Conv2d(384, 384, size, padding=size // 2, groups=384, bias=False) for _ in range(24))
        )
        images = torch.rand(64, 384, 32, 32)

        def step():
            with torch.no_grad():
                layers(images)

        return step

    small, large, huge = (seconds(partial(variant, size), "RTX 2080 Ti") for size in (3, 15, 29))
    flops = 24 * 2 * 64 * 384 * 32**2 * 15**2
    assert small < flops / 13.4e12 < large and huge == pytest.approx((29 / 15) ** 2 * large, rel=0.05)


def test_where_a_part_is_not_known_the_time_is_at_least_so_long():
    table = repr(predict(forward(lambda x: torch.linalg.svd(x)[0], 64, 64), "T4"))
    assert "at least " in table and "[" not in next(line for line in table.splitlines() if line.startswith("T4"))


def test_a_comparison_has_no_ratio_where_a_part_is_not_known():
    """Nor against a baseline of which one is not."""

    def variant(width, svd=False):
        layer, rows = nn.Linear(width, width), torch.rand(8, width)
        decompose = torch.linalg.svdvals if svd else lambda x: x
        return lambda: decompose(layer(rows)).sum().backward()

    variants = {"known": variant, "not": partial(variant, svd=True)}
    for order in (("known", "not"), ("not", "known")):
        found = predict_full_size({name: variants[name] for name in order}, {"width": 64}, ["T4"])
        (known,), (other,) = found["known"], found["not"]
        assert known.ratio is other.ratio is None and "_linalg_svd" in other.untimed and not known.untimed
        assert other.tell_time().startswith("at least ") and known.tell_time() == format_seconds(known.seconds[0])


def test_the_bus_of_an_h100_is_faster_in_a_copy_as_in_a_send():
    copy = Event(COPY, None, bytes=2**28, pinned=True)
    a100, h100 = (Timeline((copy,), find_gpu(name))._gpu_seconds(copy)[1] for name in ("A100 80 GB", "H100"))
    assert a100 == 2**28 / 24e9 and h100 == 2**28 / 54e9


def test_the_bias_of_a_transposed_convolution_is_added_to_what_it_gives():
    def variant():
        layer, images = nn.ConvTranspose2d(4, 4, 2, stride=2).cuda(), torch.rand(1, 4, 64, 64).cuda()
        return lambda: layer(images).sum().backward()

    made = 4 * 4 * 128 * 128  # bytes
    bias = [k for s in predict(variant, "T4").segments for k in s.kernels if k.name.endswith("(bias)")]
    assert sorted(kernel.bytes for kernel in bias) == [made, 2 * made]


# --- what a step is bound by ---


@pytest.mark.parametrize(
    "variant, bound",
    [
        (training(**WIDE), PRODUCTS_BOUND),
        (forward(lambda x: x.exp().log().sin(), 8192, 8192), MEMORY_BOUND),
        (training(width=16, batch=4, depth=20), LAUNCH_BOUND),
    ],
)
def test_a_step_says_what_it_is_bound_by(variant, bound):
    time = predict(variant, "A100 80 GB").time()
    assert time.bound == bound and bound in repr(time)


def test_a_gpu_that_waits_for_the_cpu_is_bound_by_launches():
    assert (made().bound, made(calls=1e6).bound) == (PRODUCTS_BOUND, LAUNCH_BOUND)


def test_what_compiling_saves_is_taken_off_the_rest_and_not_off_the_optimizer():
    def compiled():
        step = training(**WIDE)()
        return lambda: torch.compile(step)()

    eager, fused = (
        predict_full_size({"it": each}, {"it": each}, ["T4"])["it"][0] for each in (training(**WIDE), compiled)
    )
    assert fused.seconds[0] < eager.seconds[0] and sum(fused.parts.values()) == pytest.approx(fused.seconds[0])
    assert fused.parts[OPTIMIZER] == eager.parts[OPTIMIZER] and fused.parts[PRODUCT] == eager.parts[PRODUCT]


def test_the_table_adds_up():
    time = predict(training(**WIDE), "T4").time()
    assert set(time.table) <= set(KINDS) and {PRODUCT, OPTIMIZER, OTHER} <= set(time.table)
    assert sum(row.seconds for row in time.table.values()) == pytest.approx(time.expected)
    parts = predict_full_size({"wide": training}, {"wide": training(**WIDE)}, ["T4"])["wide"][0].parts
    assert sum(parts.values()) == pytest.approx(time.expected) and parts[OPTIMIZER] == time.table[OPTIMIZER].seconds
    headings, rows = time.rows()
    assert headings == ["kind", "time", "FLOPs", "bytes", "kernels"] and rows[0][0] == PRODUCT
    assert time._repr_html_().startswith("<table><caption>T4: ")


# --- ranges and ratios ---


def made(gpu="A100 80 GB", calls=0.0, number=1, **changes):
    kernel = Kernel("mm", PRODUCT, "fp32", 2 * 4096**3, 3 * 4 * 4096**2, 1, (1, 4096, 4096, 4096))
    return step_time([Segment(Counter({kernel._replace(**changes): number}), calls)], find_gpu(gpu))


@given(st.integers(1, 10**4), st.floats(0, 1e6), st.sampled_from(sorted(known_gpus())))
def test_what_is_expected_lies_in_the_range(number, calls, gpu):
    time = made(gpu, calls, number)
    assert 0 < time.low < time.expected < time.high < 7 * time.low
    assert time.expected >= max(calls * find_gpu(gpu).launch, time.table[PRODUCT].seconds) * (1 - 1e-9)


@given(st.integers(1, 100), st.integers(1, 100))
def test_a_ratio_of_like_steps_is_known_better_than_their_times(ours, theirs):
    a, b = made(number=ours), made(number=theirs)
    ratio, low, high = time_ratio(a, b)
    assert ratio == pytest.approx(ours / theirs)
    assert low < ratio < high and high / low < a.high / a.low
    assert time_ratio(b, a)[0] == pytest.approx(1 / ratio)
    _, low_of_unlike, high_of_unlike = time_ratio(made(kind=OTHER, product=None, bytes=GiB), b)
    assert high_of_unlike / low_of_unlike > high / low


def test_a_ratio_is_known_the_better_the_more_the_steps_have_in_common(monkeypatch):
    def widths():
        ratios = [time_ratio(made(number=100 + more), made(number=100)) for more in (0, 5, 20, 80, 300)]
        return [math.log(high / low) / 2 / NINE_OF_TEN for _, low, high in ratios]

    same, *differ = widths()
    assert same == pytest.approx(LEAST_OF_RATIOS) and same < differ[0] < differ[1] < differ[2]
    most = math.hypot(LEAST_OF_RATIOS, SPREAD_OF_RATIOS[audited.OTHERS])
    assert differ[2:] == pytest.approx([most, most])
    monkeypatch.setitem(SPREAD_OF_RATIOS, audited.OTHERS, 0.0)
    assert widths() == pytest.approx([LEAST_OF_RATIOS] * 5), "of the same kinds of operations"


def test_a_gpu_that_no_run_was_compared_on_says_so_and_its_range_is_wider(monkeypatch):
    """In the table, in what a program reads, and in a comparison."""
    cells = {("A100", audited.TRANSFORMERS, "fp32"): 3, ("T4", audited.CONVOLUTIONAL, "fp32"): 2}
    monkeypatch.setattr(audited, "_counted", lambda: cells)
    attention = Counter([a_kernel(PRODUCT, batch=4)._replace(format="fp32"), A_SOFTMAX])
    checked, unseen = (step_time([Segment(attention)], find_gpu(gpu)) for gpu in ("A100 40 GB", "RTX 4080"))
    assert (checked.checked_by, unseen.checked_by) == (3, 0) and unseen.network == (audited.TRANSFORMERS, "fp32")
    assert not checked.tell_unchecked() and unseen.tell_unchecked() == "transformers in fp32"
    width = lambda time: math.log(time.high / time.low) / 2 / NINE_OF_TEN
    without = math.sqrt(width(unseen) ** 2 - EXTRAPOLATED**2)
    assert without == pytest.approx(width(checked), rel=0.01) and without > SPREAD_OF_SOURCES[audited.TRANSFORMERS]
    predicted = predict(classifying, ["T4", "A100 80 GB", "RTX 4080"])
    told = [line for line in repr(predicted).splitlines() if line.startswith("no published time")]
    assert told == ["no published time to check this by: transformers in fp32 on T4, RTX 4080"]
    assert [gpu["time"]["checked_by"] for gpu in predicted.to_dict()["gpus"]] == [0, 3, 0]
    (one, _, other) = predict_full_size({"small": classifying}, {"small": classifying}, ["T4", "A100", "4080"])["small"]
    assert one.unchecked == other.unchecked == "transformers in fp32"


def classifying():
    model, texts, labels = workloads.text_classifier(batch=2, length=64, width=64, heads=4, layers=1)
    return lambda: F.cross_entropy(model(texts), labels).backward()


def a_kernel(kind, share=1.0, batch=1):
    product, layout = (batch, round(share * 8192), 4096, 4096), {ATTENTION: "flash", CONVOLUTION: "nchw"}.get(kind, "")
    return Kernel(kind, kind, "fp16", 2 * math.prod(product), 0, 1, product, layout=layout)


A_SOFTMAX = Kernel("_softmax", NORM, "fp16", 0, 2**20)


@pytest.mark.parametrize(
    "kernels, kind",
    [
        ([a_kernel(PRODUCT), a_kernel(ATTENTION, 0.01)], audited.TRANSFORMERS),
        ([a_kernel(PRODUCT), a_kernel(PRODUCT, 0.01, batch=16), A_SOFTMAX], audited.TRANSFORMERS),
        ([a_kernel(PRODUCT), a_kernel(PRODUCT, 0.01, batch=16)], audited.OTHERS),  # as of a recommender's pairs
        ([a_kernel(PRODUCT), A_SOFTMAX], audited.OTHERS),
        ([a_kernel(PRODUCT), a_kernel(ATTENTION), a_kernel(CONVOLUTION, 0.3)], audited.TRANSFORMERS),
        ([a_kernel(PRODUCT)], audited.OTHERS),
        ([a_kernel(PRODUCT), a_kernel(CONVOLUTION, 0.01)], audited.OTHERS),
        ([a_kernel(PRODUCT), a_kernel(CONVOLUTION, 0.3)], audited.CONVOLUTIONAL),
        ([a_kernel(PRODUCT), a_kernel(CONVOLUTION, 3), a_kernel(ATTENTION)], audited.CONVOLUTIONAL),
    ],
)
def test_a_network_is_of_a_kind_that_was_compared_only_where_it_attends_or_convolves(kernels, kind):
    time = step_time([Segment(Counter(kernels), 0.0)], find_gpu("A100 40 GB"))
    assert time.network == (kind, "fp16")
    assert (time.tell_unchecked() == "steps without attention in fp16") == (kind == audited.OTHERS)


@pytest.mark.parametrize(
    "format, gpu, counted", [("tf32", "T4", "fp32"), ("tf32", "A100", "tf32"), ("bf16", "P100", "fp32")]
)
def test_a_network_counts_as_what_the_gpu_multiplies_in(format, gpu, counted):
    assert made(gpu, format=format).network == (audited.OTHERS, counted)
    convolved = dict(kind=CONVOLUTION, layout="wide nchw", format=format)
    assert made(gpu, **convolved).network == (audited.CONVOLUTIONAL, counted)
    assert made(gpu, kind=OTHER, product=None, format=format).network is None


def test_the_table_of_audited_runs_names_gpus_kinds_and_formats_that_there_are():
    gpus = {audited.family(gpu) for gpu in known_gpus()}
    assert {audited.family("A100 80 GB"), audited.family("V100")} == {"A100", "V100"}
    for (gpu, kind, format), runs in audited._counted().items():
        assert gpu in gpus and kind in (audited.TRANSFORMERS, audited.CONVOLUTIONAL) and runs > 0
        assert format in dict(find_gpu(gpu).rates)
    assert audited.audited_runs("A100 40 GB", audited.TRANSFORMERS, "bf16") > 10
    assert audited.audited_runs("T4", audited.TRANSFORMERS, "fp16") > 0
    assert audited.audited_runs("B200", audited.TRANSFORMERS, "bf16") == 0


def test_images_in_16_bits_are_reordered_on_turing():
    """fp16 alone: what was fitted on an RTX 2080 Ti holds on a T4, and with channels last nothing changed."""
    wide = dict(kind=CONVOLUTION, format="fp16", bytes=1)
    seconds = lambda gpu, layout: made(gpu, layout=f"wide {layout}", **wide).table[CONVOLUTION].seconds
    for gpu in ("T4", "RTX 2080 Ti"):
        assert seconds(gpu, "nchw") / seconds(gpu, "nhwc") == pytest.approx(0.94 / 0.53, rel=0.05)
    assert seconds("V100", "nchw") / seconds("V100", "nhwc") == pytest.approx(0.94 / 0.8, rel=0.05)


def test_a_step_without_kernels_has_no_ratio():
    nothing = step_time([Segment()], find_gpu("A100 80 GB"))
    assert nothing.expected == 0 and nothing.bound == LAUNCH_BOUND
    with pytest.raises(ValueError, match="got one that runs none"):
        time_ratio(made(), nothing)


# --- GPUs ---


def test_every_gpu_of_the_table_has_a_time_and_says_where_its_numbers_come_from():
    predicted = predict(training(**WIDE))
    headings, rows = predicted.table()
    assert headings[-2:] == ["time per step", "bound by"] and len(rows) == len(known_gpus())
    times = {gpu: predicted.time(gpu).expected for gpu in known_gpus()}
    assert times["T4"] > times["V100"] > times["RTX 4090"] and times["A100 40 GB"] > times["H100"]
    for row in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()):
        assert all(row[column] for column in row if column.endswith("_from")), row["name"]


def test_several_gpus_are_shown_on_one_screen():
    predicted = predict(training(), ["T4", "A100 80", "16 GiB"])
    assert [gpu.name for gpu in predicted.gpus] == ["T4", "A100 80 GB", "16 GiB"]
    assert predicted.table()[1][2][-2:] == ["–", "–"], "a size has no time"
    told = repr(predicted)
    assert told.count("fits") == 3 and "time per step" in told and "kernels" not in told
    assert "kernels" in repr(predict(training(), "T4"))


@pytest.mark.parametrize(
    "ask, why",
    [
        (lambda: predict(training(), "16 GiB").time(), "expected a GPU whose speed is known, .* got 16 GiB"),
        (lambda: predict(training(), "T4").time("T5"), "gpu: expected one of"),
        (lambda: predict(training(), []), "gpu: expected at least one GPU, got none"),
        (lambda: predict(training(), ["T4", "T5"]), "gpu: expected one of"),
    ],
)
def test_a_time_that_cannot_be_told_is_refused(ask, why):
    with pytest.raises(ValueError, match=why):
        ask()


HERE = Gpu(
    "Here", 8 * GiB, (8, 6), (100 * MiB, 900 * MiB), 28, (("fp32", 9e12), ("fp16", 2e13)), 3e11, 3 * MiB, 2e-6, 9e-6
)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("no home directory")])
def test_gpus_are_known_where_a_user_has_no_home(monkeypatch, error):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr("pathlib.Path.home", Mock(side_effect=error))
    assert find_gpu("T4") in known_gpus().values()


def test_a_line_of_ones_own_is_kept_and_wins():
    assert calibration.store(HERE) == str(own_table())
    faster = known_gpus()["T4"].rates[0][1] * 2
    calibration.store(Gpu(**{**vars(known_gpus()["T4"]), "rates": (("fp32", faster),)}))
    assert find_gpu("here") == HERE
    assert find_gpu("Tesla T4").rate("fp32") == find_gpu("T4").rate("bf16") == pytest.approx(faster)
    assert list(read_table(own_table())) == ["Here", "T4"]
    assert predict(training(), "here").time().gpu == HERE
    with pytest.raises(ValueError, match=r"^gpu: expected one of"):
        find_gpu("RTX 9999")


def test_a_card_that_was_measured_has_a_capability_whatever_is_known_of_its_context():
    calibration.store(HERE)
    attend = lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)
    ours, size = (predict(forward(attend, 1, 1, 64, 64, dtype=torch.bfloat16), gpu) for gpu in ("here", "16 GiB"))
    assert not ours.assumptions and "compute capability 8.0 or higher" in size.assumptions[0]


@pytest.mark.parametrize("old, new", [(",9,", ",x,"), ("8.6", "8"), ("300", "-1"), (",28,", ",,")])
def test_a_line_that_cannot_be_read_is_named(old, new):
    calibration.store(HERE)
    text = own_table().read_text()
    assert old in text
    own_table().write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r"gpus.csv, line 2: expected a GPU as in gpus.csv"):
        find_gpu("T4")


@pytest.mark.parametrize("name, expected", [("Tesla T4", "T4"), ("NVIDIA L40", "NVIDIA L40")])
def test_calibration_measures_each_number_of_a_line(name, expected, simulate_gpu, monkeypatch):
    """On a GPU where all takes half a second; the arithmetic from seconds to rates is real."""
    took = []
    gpu = simulate_gpu(name, (8, 9), 15 * GiB)
    gpu.properties.L2_cache_size = 4 * MiB
    devices = chain([torch.device("cuda")], repeat(torch.device("meta")))  # asked whether there is a GPU, first
    replaced = {
        "find_device": lambda: next(devices),
        "time_for": lambda step, seconds: took.append(torch.backends.cuda.matmul.fp32_precision) or [0.5] * 10,
        "_draw": lambda dtype: torch.empty(calibration.SIZE, 2, device="meta", dtype=dtype),
        "_measure_kernel": lambda: 2e-6,
        "_small": lambda: None,
        "predict": lambda *_: SimpleNamespace(segments=[Segment(calls=1000)]),
    }
    for attribute, value in replaced.items():
        monkeypatch.setattr(calibration, attribute, value)
    with multiplying_as("none"):
        found = calibration.calibrate()
    assert (found.name, found.memory, found.multiprocessors, found.cache) == (expected, 15 * GiB, 132, 4 * MiB)
    assert dict(found.rates) == dict.fromkeys(("fp32", "tf32", "fp16", "bf16"), 2 * calibration.SIZE**3 / 0.5)
    assert found.bandwidth == 2 * GiB / 0.5 and found.kernel == 2e-6 and found.launch == 0.5 / 1000
    assert took == ["none", "none", "ieee", "tf32", "none", "none"]


def test_without_a_gpu_there_is_nothing_to_calibrate(capsys):
    assert main(["calibrate"]) == 2
    assert "calibrate: expected a GPU that CUDA can use, found none" in capsys.readouterr().err


def test_calibrate_keeps_and_shows_what_it_measured(monkeypatch, capsys):
    monkeypatch.setattr(calibration, "calibrate", lambda: HERE)
    assert main(["calibrate"]) == 0
    told = capsys.readouterr().out
    assert "products in fp16" in told and "20.0 TFLOP/s" in told and str(own_table()) in told
    assert find_gpu("here") == HERE


@pytest.mark.gpu
def test_a_gpu_is_calibrated_in_under_a_minute():
    import time

    began = time.monotonic()
    gpu = calibration.calibrate()
    assert time.monotonic() - began < 60
    assert 1e12 < gpu.rate("fp32") < 1e15 and 1e10 < gpu.bandwidth < 1e14
    assert 1e-7 < gpu.kernel < 1e-4 and 1e-6 < gpu.launch < 1e-3


# --- the command line ---


def test_the_command_tells_the_time_of_an_epoch_and_exits_with_the_code_of_the_smallest_gpu(tmp_path, capsys):
    path = tmp_path / "train.py"
    step = "torch.nn.Linear(64, 60_000_000)(torch.ones(4, 64)).sum().backward()"
    path.write_text(f"import torch\nvariant = lambda: lambda: {step}\n")
    asked = ["predict", f"{path}:variant", "--gpu", "H200", "--samples", "1001"]
    assert main([*asked, "--batch", "4"]) == 0
    assert main([*asked, "--batch", "4", "--gpu", "T4"]) == 3
    *_, epoch = capsys.readouterr().out.split("an epoch of 1,001 samples takes 251 steps\n")
    assert [line.split("  ")[0] for line in epoch.splitlines()] == ["H200", "T4"] and " [" in epoch


def test_where_a_part_is_not_known_an_epoch_takes_at_least_so_long(tmp_path, capsys):
    path = tmp_path / "train.py"
    step = "torch.linalg.svd(torch.nn.Linear(64, 64)(torch.ones(64, 64)))[0].sum().backward()"
    path.write_text(f"import torch\nvariant = lambda: lambda: {step}\n")
    assert main(["predict", f"{path}:variant", "--gpu", "T4", "--samples", "1000", "--batch", "4"]) == 0
    assert re.search(r"\nT4 +at least [^\[]+$", capsys.readouterr().out)


# --- against what was published ---


def test_a_published_time_is_met():
    outcome = published_times.run(next(case for case in published_times.CASES if case.name == "GPT-2, bf16"))
    assert abs(outcome.error) < 0.1 and outcome.is_inside and outcome.width < 0.25
    assert outcome.data_sheet < outcome.published


def test_no_row_both_calibrates_and_is_audited():
    rows = [(case.source, case.name, case.format, case.gpu) for case in published_times.CASES]
    assert len(set(rows)) == len(rows)
    assert {case.calibrates for case in published_times.CASES if case.source == published_times.TIMM} == {True, False}


def shown(case):
    """The run's row in docs/audit.md."""
    runs = predictions.EVERY.read_text(encoding="utf-8").partition(f"### [{case.source}]")[2].partition("\n### ")[0]
    (row,) = [row for row in runs.splitlines() if row.startswith(f"| {case.name} | {case.gpu} | {case.format} | ")]
    return row


def test_nine_of_ten_published_transformers_lie_in_their_range():
    rows = [shown(case) for case in published_times.CASES if not case.calibrates and not case.convolutional]
    assert len(rows) > 100 and sum("outside" not in row for row in rows) >= 0.9 * len(rows)
    errors = sorted(abs(float(re.search(r"([+−]\d+\.\d)%", row)[1].replace("−", "-"))) for row in rows)
    assert errors[len(errors) // 2] < 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in published_times.CASES if not c.calibrates][::25], ids=lambda case: case.name
)
def test_a_published_time_is_predicted_as_the_page_shows_it(case):
    """`make predictions` predicts all."""
    ((row,),) = (rows for rows in published_times.tables([published_times.run(case)]).values() if rows)
    assert row == shown(case), "make predictions"


@pytest.mark.parametrize("gpu, half", [("T4", True), ("T4", False), ("A100 80 GB", True)])
def test_inference_mode_takes_the_same_kernels_as_no_grad(gpu, half):
    """In inference mode, PyTorch hands over a linear layer or attention whole: its products must not be missed."""

    def variant(context):
        model, texts, _ = workloads.text_classifier(batch=2, length=64, width=64, heads=4, layers=1)
        decorated = torch.autocast("cuda", torch.float16, enabled=half)(context()(model.eval()))
        return lambda: decorated(texts).sum()

    two = [predict(partial(variant, context), gpu).time() for context in (torch.no_grad, torch.inference_mode)]
    tables = [{kind: (row.flops, row.bytes, row.number) for kind, row in time.table.items()} for time in two]
    assert tables[0] == tables[1] and tables[0]["matrix products"][0] > 0 and "attention" in tables[0]
