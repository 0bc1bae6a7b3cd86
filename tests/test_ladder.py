"""The ladder, lesson 16, has what the lessons before it teach: a line that each of them marks as new is in its code."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from test_lessons import LESSONS, code, prose, read

LADDER = next(path for path in LESSONS if path.stem == "16_ladder")
EARLIER = [path for path in LESSONS if path.stem < LADDER.stem or path.stem == "21_shapes"]  # 21 was cut out of 05

# What stands in a marked line of a lesson, and in the ladder.
TECHNIQUES = {
    "02_dataloader": ["DataLoader(", "num_workers=", "persistent_workers=True"],
    "03_pinned_memory": [".to(device, non_blocking=True)"],
    "08_mixed_precision": [
        "with torch.autocast(device.type,",
        "scaler.scale(loss).backward()",
        "scaler.step(optimizer)",
        "scaler.update()",
        'torch.set_float32_matmul_precision("high")',
    ],
    "09_optimizers": ["partial(AdamW, fused=True)"],
    "10_zero_grad": ["optimizer.zero_grad()"],
    "14_compile": ["torch.compile(", 'mode="reduce-overhead")'],
    "15_lr_schedules": ["lr_scheduler.OneCycleLR(optimizer, peak,", "scheduler.step()"],
    "21_shapes": ["padded = math.ceil(vocabulary / 64) * 64", "wide.bias[vocabulary:] = -math.inf"],
}
NOT_IN_IT = {
    "00_measuring": "it teaches to measure, and nothing about training",
    "01_anatomy": "it measures native norms and GELUs, which the ladder has from the start; its text says so",
    "04_padding_and_packing": "the ladder's data is one stream, cut at the context length: nothing is padded",
    "05_batch_size": "a larger batch is a number, and no line of code",
    "06_gradient_accumulation": "for a batch that does not fit; the text of the loop sends there",
    "07_gradient_checkpointing": "it buys memory with time, and the ladder buys time; its text sends there",
    "11_no_grad_validation": "the loop to copy only trains; its text sends there for validation",
    "12_debug_apis": "what it turns on finds mistakes, and slows a training down",
    "13_cudnn_benchmark": "its switches are those of convolutions, and a GPT has none",
}


OTHER_TRAINING = {"medium_batch", "large_batch"}  # for these the gate is the mean of the small batches' losses


def source(path: Path) -> str:
    """The code of a notebook's cells, without IPython's magics."""
    cells = "\n".join(cell.source for cell in code(read(path)))
    return re.sub(r"^(\s*)%.*$", r"\1pass", cells, flags=re.MULTILINE)


def marked(text: str) -> list[str]:
    """The lines marked as new; of a bracket that closes on one, all that it closes."""
    lines, found = text.splitlines(), []
    for number, line in enumerate(lines):
        if line.endswith("# new"):
            start = number
            while re.match(r"\s*[)\]}]", lines[start]):
                inside = len(line) - len(line.lstrip())
                start = next(n for n in reversed(range(start)) if len(lines[n]) - len(lines[n].lstrip()) == inside)
            found.append("\n".join(lines[start : number + 1]))
    return found


def bare(text: str) -> str:
    """Without spaces, line breaks and the commas before a closing bracket, which a formatter sets as it needs."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", text))


def without_comments(text: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return tokenize.untokenize(token for token in tokens if token.type != tokenize.COMMENT)


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """The calls of a function, in their order."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sorted((n for n in found if getattr(n.func, "id", "") == name), key=lambda n: n.lineno)


def segment(function: str) -> str:
    """The source of one of the ladder's functions, with its comments."""
    return re.search(rf"^def {function}\(.*?(?=^\S|\Z)", source(LADDER), re.MULTILINE | re.DOTALL)[0]


def test_every_earlier_lesson_has_an_entry():
    assert EARLIER and sorted([*TECHNIQUES, *NOT_IN_IT]) == [path.stem for path in EARLIER]
    assert all(TECHNIQUES.values()) and all(NOT_IN_IT.values())


@pytest.mark.parametrize("lesson, fragment", [(n, f) for n, fragments in TECHNIQUES.items() for f in fragments])
def test_a_technique_of_an_earlier_lesson_is_in_the_ladder(lesson, fragment):
    (path,) = [path for path in EARLIER if path.stem == lesson]
    assert any(bare(fragment) in bare(line) for line in marked(source(path))), "it is no new line of its lesson"
    assert bare(fragment) in bare(without_comments(source(LADDER))), "it is not in the ladder"


def test_each_rung_is_a_function_that_is_climbed_once_and_passes_the_gate_first():
    tree = ast.parse(source(LADDER))
    climbed = [call.args[1].id for call in calls(tree, "climb")]
    assert len(climbed) == len(set(climbed)) == 11
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for rung in climbed:
        (argument,) = functions[rung].args.args
        assert argument.arg == "step" and "# new" in segment(rung), rung
    gated = {name.id for call in calls(tree, "same") for name in ast.walk(call) if isinstance(name, ast.Name)}
    assert {*climbed} - gated == OTHER_TRAINING


def test_native_attention_takes_the_place_of_the_written_one():
    assert "class WrittenAttention(workloads.Attention):" in source(LADDER)
    assert "block.attention.__class__ = workloads.Attention  # new" in segment("fused_attention")


@pytest.mark.parametrize("lesson", [lesson for lesson, reason in NOT_IN_IT.items() if "text" in reason])
def test_the_text_sends_to_what_the_ladder_leaves_out(lesson):
    assert f"({lesson}.ipynb)" in prose(read(LADDER))


def test_what_is_marked_is_told_apart_from_what_is_not():
    text = "a = f(\n    b,\n    c=1,\n)  # new\nd = g(\n    e,  # new\n    h,\n)\nwith i():  # new\n    k()\n"
    assert [bare(line) for line in marked(text)] == ["a=f(b,c=1)#new", "e,#new", "withi():#new"]
    assert bare(without_comments("x = 1  # fused=True\n")) == "x=1"
