"""A technique done wrong turns its lesson red: in the cells that are compared, and without a clock."""

import re

import nbformat
import pytest
from test_lessons import CHECKED, LESSONS, code, each_lesson, read, run_lesson, text_of

# A technique done wrong, for each lesson: what stands in one of its cells, and what stands there then.
MUTATIONS = {
    "00_measuring": ("3 * layers * product - product", "3 * layers * product"),
    "01_anatomy": ("return layer(x)  # new", "return written_norm(layer, x)  # new"),
    "02_dataloader": ("shuffle=True, generator=order,", "shuffle=True,"),
    "03_pinned_memory": ("slots[k % 2].copy_(", "slots[0].copy_("),
    "04_padding_and_packing": ("parts[3, row, here] = document  # new", "parts[3, row, here] = 1  # new"),
    "05_batch_size_and_shapes": ("wide.bias[vocabulary:] = -math.inf  # new", "wide.bias[vocabulary:] = 0.0  # new"),
    "06_gradient_accumulation": (
        'loss = loss_of(model, piece, reduction="sum") / tokens  # new',
        "loss = loss_of(model, piece) / pieces  # new",
    ),
    "07_gradient_checkpointing": ("x = checkpoint(block, x, use_reentrant=False)  # new", "x = block(x)  # new"),
    "08_mixed_precision": (
        "with torch.autocast(device.type, dtype):  # new",
        "with torch.autocast(device.type, dtype, enabled=False):  # new",
    ),
    "09_optimizers": ("each[parameter].zero_grad()", "pass"),
    "10_zero_grad": ("optimizer.zero_grad()  # new", "optimizer.zero_grad(set_to_none=False)  # new"),
    "11_no_grad_validation": ("with context():  # new", "with nullcontext():  # new"),
    "12_debug_apis": (
        "return torch.autograd.set_detect_anomaly(True)  # new",
        "return torch.autograd.set_detect_anomaly(False)  # new",
    ),
    "13_cudnn_benchmark": (
        "torch.use_deterministic_algorithms(on)  # new",
        "torch.use_deterministic_algorithms(False)  # new",
    ),
    "14_compile": (
        "compiled_block = torch.compile(run_block, backend=backend)  # new",
        "compiled_block = run_block  # new",
    ),
    "15_lr_schedules": ("if done % every == 0:\n            scheduler.step()", "pass"),
    "16_ladder": ("wide.bias[vocabulary:] = -math.inf  # new", "pass  # new"),
    "17_distilbert_150k": (
        "mask = None if sizes.min() == sizes.max() else (ids != 0).long()  # new",
        "mask = None  # new",
    ),
    "18_pruning": (
        "following.weight = nn.Parameter(following.weight[:, keep])  # new",
        "following.weight = nn.Parameter(following.weight[:, : len(keep)])  # new",
    ),
    "19_inference": (
        "conv.bias = nn.Parameter(part.bias - part.running_mean * scale)  # new",
        "conv.bias = nn.Parameter(part.bias)  # new",
    ),
    "20_multi_gpu": ("return rows.chunk(ranks)[dist.get_rank() % ranks]  # new", "return rows.chunk(ranks)[0]  # new"),
}


@each_lesson
def test_a_technique_done_wrong_is_noticed(path, tmp_path, monkeypatch):
    check_noticed(path, *MUTATIONS[path.stem], tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("waits", ["copies.wait_stream(torch.cuda", "torch.cuda.current_stream().wait_stream(copies)"])
def test_a_stream_that_does_not_wait_is_noticed(waits, tmp_path, monkeypatch):
    (lesson,) = (path for path in LESSONS if path.stem == "03_pinned_memory")
    done_wrong = re.sub(r"[a-z_.()]+\.wait_stream\(", "id(", waits)
    check_noticed(lesson, waits, done_wrong, tmp_path, monkeypatch)


def check_noticed(path, right, wrong, tmp_path, monkeypatch):
    """By the cells that are compared: they raise, or print something else. Nothing after the last of them is run."""
    notebook = read(path)
    checked = [i for i, cell in enumerate(notebook.cells) if CHECKED in cell.metadata.get("tags", [])]
    notebook.cells = notebook.cells[: checked[-1] + 1]
    mutated = [cell for cell in code(notebook) if right in cell.source]
    assert len(mutated) == 1
    mutated[0].source = mutated[0].source.replace(right, wrong)
    stored = [text_of(notebook.cells[i]) for i in checked]
    nbformat.write(notebook, tmp_path / path.name)
    failure, ran = run_lesson(tmp_path / path.name, monkeypatch)
    raised = [
        i for i, cell in enumerate(ran.cells) if any(out.output_type == "error" for out in cell.get("outputs", []))
    ]
    assert set(raised) <= set(checked), failure
    assert raised or stored != [text_of(ran.cells[i]) for i in checked]
