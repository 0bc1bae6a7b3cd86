"""Each lesson in one kernel, without a network: run, done wrong, run again, and the solutions of its exercises."""

import ast
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import nbformat
import pytest
import stand_ins
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from test_lessons import (
    CHECKED,
    LESSONS,
    MEASURES,
    checked_with_what_they_need,
    code,
    each_lesson,
    is_checked,
    is_magic,
    measures,
    prose,
    read,
    text_of,
)

from effgpu.course.kernels import fork_kernel
from effgpu.measuring import timing

# A technique done wrong, for each lesson: what stands in one of its cells, and what stands there then.
MUTATIONS = {
    "00_measuring": ("length = int(share * texts.shape[1])", "length = texts.shape[1]"),
    "01_anatomy": ("training(nn.LayerNorm, nn.GELU, **size)  # new", "training(WrittenNorm, nn.GELU, **size)  # new"),
    "02_dataloader": ("shuffle=True, generator=order,", "shuffle=True,"),
    "03_pinned_memory": ("images.to(device, non_blocking=True)", "torch.zeros_like(images, device=device)"),
    "04_padding_and_packing": ("torch.full_like(text, number)", "torch.full_like(text, 1)"),
    "05_batch_size": ("texts[chosen]), labels[chosen])", 'texts[chosen]), labels[chosen], reduction="sum")'),
    "06_gradient_accumulation": ("/ len(labels)  # new", "/ len(some_labels) / pieces  # new"),
    "07_gradient_checkpointing": ("x = checkpoint(block, x, use_reentrant=False)  # new", "x = block(x)  # new"),
    "08_mixed_precision": ("torch.autocast(device.type, dtype)", "torch.autocast(device.type, enabled=False)"),
    "09_optimizers": ("each[parameter].zero_grad()", "pass"),
    "10_zero_grad": ("optimizer.zero_grad()  # new", "optimizer.zero_grad(set_to_none=False)  # new"),
    "11_no_grad_validation": ("torch.no_grad(), workloads.autocast():  # new", "workloads.autocast():  # new"),
    "12_debug_apis": ("set_detect_anomaly(True):  # new", "set_detect_anomaly(False):  # new"),
    "13_cudnn_benchmark": (
        "model = model.to(memory_format=torch.channels_last)  # new\n"
        "    images = images.to(memory_format=torch.channels_last)  # new\n",
        "pass\n",
    ),
    "14_compile": ("model.compile()  # new", "pass  # new"),
    "15_lr_schedules": ("if done % every == 0:\n            scheduler.step()", "pass"),
    "16_ladder": ("v, is_causal=True)  # new", "v, is_causal=False)  # new"),
    "17_distilbert_150k": (
        "list(LengthGroupedSampler(batch, lengths=lengths)), batch)  # new",
        "list(range(len(lengths))), batch)",
    ),
    "18_pruning": ("last.weight[:, keep])  # new", "last.weight[:, : len(keep)])  # new"),
    "19_inference": ("model.to(workloads.choose_16_bits())  # new", "pass  # new"),
    "20_multi_gpu": ("rows.chunk(dist.get_world_size())[dist.get_rank()]", "rows.chunk(dist.get_world_size())[0]"),
    "21_shapes": ("wide.bias[outputs:] = -math.inf  # new", "wide.bias[outputs:] = 0.0  # new"),
    "22_out_of_memory": ("loss = loss / len(labels)  # new", "loss = loss / len(some_labels)  # new"),
    "23_lora": ("torch.zeros(outputs, rank, device=device)", "torch.ones(outputs, rank, device=device)"),
    "24_table_of_2022": ("x = checkpoint(block, x, use_reentrant=False)  # new", "x = block(x)  # new"),
    "25_doctor": ("get_total_norm(gradients)  # new", "get_total_norm(gradients[:1])  # new"),
    "26_large_vocabulary": ("return total / (labels != -100).sum()  # new", "return total / len(labels)  # new"),
    "27_keep_or_recompute": (
        "partial(create_selective_checkpoint_contexts, keep_products)  # new",
        "partial(create_selective_checkpoint_contexts, [])  # new",
    ),
    "28_profile": ('nn.GELU(approximate="tanh")  # new', "nn.GELU()  # new"),
    "29_limit": ("gradient @ weight  # the", "pass  # the"),
}

DEFINES = ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom
TAKE_LONG = {*MEASURES, "predict", "largest", "measure"}
ONCE = {  # words of cells that train, or predict, for 3 to 25 seconds, and that no checked cell needs
    "00_measuring": ("intervals = []",),
    "05_batch_size": ("def one_batch(", "critical batch size"),
    "08_mixed_precision": ("def train(dtype)",),
    "15_lr_schedules": ("constant_losses = ",),
    "17_distilbert_150k": ("runs = {}",),
    "18_pruning": ("trials = [",),
    "20_multi_gpu": ("1000 * gradients / rate",),
    "25_doctor": ("\nask(script)", "\nask(in_16_bits)", "\nask(mended)", 'ask(mended, "H100")'),
}
ON_THE_HUB = "from effgpu.course import hub\n"  # begins a solution that needs a network


NO_NETWORK = """
import socket
real = socket.socket.connect
def connect(self, address):
    if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
        return real(self, address)
    raise ConnectionRefusedError(f"no network in this test, asked for {address}")
socket.socket.connect = connect
"""


def test_each_lesson_has_a_mistake_to_notice():
    assert list(MUTATIONS) == [path.stem for path in LESSONS]


@pytest.mark.parametrize("lesson", ONCE)
def test_what_runs_only_once_is_one_cell_that_no_checked_cell_needs(lesson):
    (path,) = [path for path in LESSONS if path.stem == lesson]
    needed = {cell.id for cell in checked_with_what_they_need(read(path))}
    for words in ONCE[lesson]:
        (cell,) = [cell for cell in code(read(path)) if words in cell.source]
        assert cell.id not in needed


@pytest.mark.slow
@each_lesson
def test_runs_twice_offline_notices_a_mistake_and_has_solutions_that_run(path, tmp_path, monkeypatch):
    """All cells; the technique done wrong, which the checked cells notice; again all that are quick; solutions."""
    cells = code(read(path))
    with start_kernel(path, tmp_path, monkeypatch) as run:
        assert not run(cells)
        assert told(cells) == told(read(path).cells), "the checked cells differ from the stored ones"
        check_noticed(path, cells, *MUTATIONS[path.stem], run)
        again = [nbformat.from_dict(cell) for cell in cells if is_checked(cell) or not takes_long(path, cell)]
        assert not run(again), "the second run in one kernel"
        assert told(again) == told(cells), "the checked cells of the second run differ from those of the first"
        for number, (source, text) in enumerate(solutions(path), start=1):
            if ON_THE_HUB in source:
                continue
            cell = nbformat.v4.new_code_cell(source)
            assert not run([cell]), f"solution {number}"
            printed = "".join(output.get("text", "") for output in cell.outputs)
            assert not numbers(" ".join(PRINTS.findall(text))) - numbers(printed), f"solution {number}: {printed}"


SHORTER = {  # what a vocabulary of 50,257, several seeds, or 28 layers, make long
    "17_distilbert_150k": {"for seed in range(seeds)]": "for seed in range(1)]"},
    "18_pruning": {"32 * 300": "32 * 30", "load_texts(2000,": "load_texts(200,"},
    "26_large_vocabulary": {'"layers": 28': '"layers": 1'},
}
REAL = [path for path in LESSONS if any("\nreal = False" in f"\n{cell.source}" for cell in code(read(path)))]


@pytest.mark.slow
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_runs_with_pretrained_weights_and_data_that_somebody_has_saved(path, tmp_path, monkeypatch):
    """`real = True`, where the names lead to folders; without them, the first cell that needs them says what to do."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    cells = code(read(path))
    for cell in cells:
        cell.source = cell.source.replace("real = False  # @param", "real = True  # @param")
        for long, short in SHORTER.get(path.stem, {}).items():
            cell.source = cell.source.replace(long, short)
    found = "; ".join(f"hub.{name} = {folder!r}" for name, folder in stand_ins.save(tmp_path / "saved").items())
    with start_kernel(path, tmp_path, monkeypatch, forked=False) as run:  # the Hub's library reads these when imported
        cell, error = run(cells)
        assert "or set real = False" in error and "ConnectionError" in error
        assert not run([nbformat.v4.new_code_cell(f"from effgpu.course import hub; {found}")])
        assert not run(cells[cells.index(cell) :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in LESSONS if ON_THE_HUB in prose(read(path))], ids=lambda path: path.stem
)
def test_a_solution_with_pretrained_weights_runs_on_what_somebody_has_saved(path, tmp_path, monkeypatch):
    """In a kernel that has run what the solution needs of its lesson, and nothing that measures."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "saved"))
    folders = stand_ins.save(tmp_path / "saved")
    notebook = read(path)
    for cell in code(notebook):
        cell.metadata["tags"] = []
    (source,) = [source for source, _ in solutions(path) if ON_THE_HUB in source]
    notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": [CHECKED]}))
    imports, *needed = checked_with_what_they_need(notebook)
    found = "; ".join(f"hub.{name} = {folder!r}" for name, folder in folders.items())
    with start_kernel(path, tmp_path, monkeypatch) as run:
        assert not run([imports, nbformat.v4.new_code_cell(ON_THE_HUB + found), *needed])
    assert re.search(r"\d\.\d", text_of(needed[-1]))


def test_the_network_is_really_cut_off(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    asked = "import urllib.request; urllib.request.urlopen('http://192.0.2.1')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, timeout=60)
    assert "no network in this test" in done.stderr


def check_noticed(path, cells, right, wrong, run):
    """Of what the checked cells need, from the cell that is done wrong on: one raises, or prints something else."""
    notebook = read(path)
    (mistaken,) = [cell for cell in code(notebook) if right in cell.source]
    mistaken.source = mistaken.source.replace(right, wrong)
    needed = checked_with_what_they_need(notebook)
    mutated = needed[[cell.id for cell in needed].index(mistaken.id) :]
    if failed := run(mutated):
        cell, error = failed
        assert is_checked(cell), f"a cell that is not checked failed: {error}"
    else:
        ids = {cell.id for cell in mutated}
        assert told(mutated) != told([cell for cell in cells if cell.id in ids]), f"nobody noticed {wrong!r}"


def takes_long(path, cell) -> bool:
    """Whether a cell measures, predicts or draws, and defines nothing but its result; or is named in `ONCE`."""
    if is_magic(cell) or "importlib.util" in cell.source:
        return False
    if any(words in cell.source for words in ONCE.get(path.stem, ())):
        return True
    statements = ast.parse(cell.source).body
    return any(measures(each, TAKE_LONG) for each in statements) and not any(
        isinstance(each, DEFINES) for each in statements
    )


def told(cells) -> list[str]:
    return [text_of(cell) for cell in cells if is_checked(cell)]


PRINTS = re.compile(r"\b[Ii]t prints .*?[.:](?=\s|$)", re.DOTALL)  # a sentence, which a solution's output bears out


def solutions(path) -> list[tuple[str, str]]:
    """The Python in the folded solutions of a lesson's exercises, and the text after it."""
    folded = re.findall(r"<summary>Solution</summary>(.*?)</details>", prose(read(path)), re.DOTALL)
    return [found for part in folded for found in re.findall(r"```python\n(.*?)```(.*?)(?=```|$)", part, re.DOTALL)]


def numbers(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in re.findall(r"(?<!\w)\d[\d,]*(?:\.\d+)?", text)}


@contextmanager
def start_kernel(path, folder, monkeypatch, forked=True):
    """Yields a function that runs cells in the lesson's kernel, measurements cut short.

    It returns the first cell that fails and its error, else None.
    """
    (folder / "sitecustomize.py").write_text(NO_NETWORK)  # for the scripts that a lesson starts
    found_first = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found_first))
    monkeypatch.setenv(timing.CAP, "0.1")
    options = {"kernel_name": "python3", "timeout": 3600, "coalesce_streams": True}
    client = NotebookClient(nbformat.v4.new_notebook(), **options, extra_arguments=["--log-level=ERROR"])

    def run(cells):
        for cell in cells:
            cell.outputs = []
            client.nb.cells.append(cell)
            try:
                client.execute_cell(cell, len(client.nb.cells) - 1)
            except CellExecutionError as error:
                return cell, str(error)
        return None

    manager = client.create_kernel_manager()
    if forked:
        fork_kernel(manager)
    with client.setup_kernel(cwd=str(path.parent)):
        assert not run([nbformat.v4.new_code_cell(f"exec({NO_NETWORK!r}, {{}})")])
        yield run
