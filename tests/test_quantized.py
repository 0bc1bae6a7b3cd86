"""bitsandbytes as people write it: weights in 4 and 8 bits, paged optimizers, and the ways in which they are built."""

import sys
import types
from types import ModuleType

import pytest
import torch

from effgpu.attaching.replacing import replaced
from effgpu.predicting import imports
from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import FITS
from effgpu.units import GiB

WIDTH = 1024
NEEDS = "needs bitsandbytes"


class Own(torch.nn.Parameter):
    """A library's parameter, which moves in its own way, as those of bitsandbytes do."""

    def __new__(cls, data, requires_grad=False):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.moved = False
        return self

    def to(self, *args, **kwargs):
        self.data = super().to(*args, **kwargs).to(torch.uint8)
        self.moved = True
        return self


def train(model, inputs):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)

    def step():
        model(torch.randn(*inputs, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_librarys_own_parameter_stays_what_it_is():
    def variant():
        layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        layer.weight = Own(layer.weight.data)
        layer.to("cuda")
        assert type(layer.weight).__name__ == "Own" and isinstance(layer.weight, Own | torch.nn.Parameter)
        assert layer.weight.moved and layer.weight.dtype is torch.uint8
        model = torch.nn.Linear(8, 8).to("cuda")
        step = train(model, (8, 8))
        return lambda: (layer, step())[1]

    assert WIDTH**2 < predict(variant, "T4").allocated < 1.1 * WIDTH**2


def test_a_module_is_changed_from_its_import_on_and_not_after(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text("answer = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    early = types.ModuleType("early_library")
    monkeypatch.setitem(sys.modules, "early_library", early)
    early.answer = 1

    def change(module):
        return replaced([(module, "answer", 2)])

    with imports.changed({"early_library": change, "late_library": change}):
        assert early.answer == 2
        import late_library

        assert late_library.answer == 2
    assert early.answer == late_library.answer == 1
    assert not [finder for finder in sys.meta_path if isinstance(finder, imports._Finder)]
    monkeypatch.delitem(sys.modules, "late_library")


def test_a_module_that_two_ask_for_is_changed_by_both_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "asked_for.py").write_text("first = second = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    change = lambda name, value: {"asked_for": lambda module: replaced([(module, name, value)])}
    with imports.changed(change("first", 1)), imports.changed(change("second", 2)):
        import asked_for

        assert (asked_for.first, asked_for.second) == (1, 2)
    assert (asked_for.first, asked_for.second) == (0, 0)


def test_a_module_that_gets_a_name_after_another_walk_has_what_stands_in_its_place(monkeypatch):
    for file in ("/lib/site-packages/late.py", "/home/reader/late.py"):
        late, real, other = ModuleType("late"), object(), object()
        late.__file__, late.something = file, 1
        monkeypatch.setitem(sys.modules, "late", late)
        with imports.exchanged([("of_nobody_else", real, other)]):
            pass
        late.of_nobody_else = real
        with imports.exchanged([("of_nobody_else", real, other)]):
            assert late.of_nobody_else is other
        assert late.of_nobody_else is real


def layers(kind, number=8, **options):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=NEEDS)
    build = getattr(bitsandbytes.nn, kind)
    frozen = [build(WIDTH, WIDTH, bias=False, **options) for _ in range(number)]
    for layer in frozen:
        layer.weight.requires_grad_(False)
    return torch.nn.Sequential(torch.nn.Linear(64, WIDTH), *frozen, torch.nn.Linear(WIDTH, 8)).to("cuda")


@pytest.mark.parametrize(
    "options, a_weight",
    [
        ({"quant_type": "nf4"}, 0.5 + 1 / 64 + 4 / 64 / 256),  # double quantization, by default
        ({"quant_type": "fp4", "compress_statistics": False}, 0.5 + 4 / 64),
    ],
)
def test_weights_in_4_bits_take_what_they_take(options, a_weight):
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    few, many = (
        predict(lambda number=number: train(layers("Linear4bit", number, **options), (8, 64)), "T4").owners
        for number in (8, 16)
    )
    more = many["weights"] + many["other"] - few["weights"] - few["other"]
    assert more == pytest.approx(8 * WIDTH**2 * a_weight, rel=0.02)


@pytest.mark.parametrize("kind, width", [("Linear4bit", 0.516), ("Linear8bitLt", 1.0)])
def test_products_of_quantized_weights_count_as_those_of_a_linear_layer(kind, width):
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    predicted = predict(lambda: train(layers(kind), (512, 64)), "T4")
    products = sum(k.flops * n for part in predicted.segments for k, n in part.kernels.items())
    # forward, and backward for the inputs: the weights are not trained, and the first layer needs no input's gradient
    ends = 512 * 2 * (64 * WIDTH * 2 + WIDTH * 8 * 3)
    assert products == 2 * 8 * 512 * 2 * WIDTH**2 + ends
    assert 8 * WIDTH**2 * width < predicted.owners["weights"] + predicted.owners["other"]
    assert predicted.verdict() == FITS and not predicted.unknown


QLORA = """
import bitsandbytes, torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("tiny", quantization_config=config, device_map={"": 0})
model.requires_grad_(False)
model.model.layers[0].input_layernorm.weight.requires_grad_(True)
optimizer = bitsandbytes.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad])
for _ in range(3):
    tokens = torch.randint(0, 1000, (2, 64)).to("cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_checkpoint_is_loaded_in_4_bits_by_transformers(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_key_value_heads=8, **sizes)).to(torch.float16)
    model.save_pretrained(tmp_path / "tiny")
    (tmp_path / "train.py").write_text(QLORA)
    monkeypatch.chdir(tmp_path)
    predicted = predict("train.py", "T4")
    linear = sum(layer.weight.numel() for layer in model.model.modules() if isinstance(layer, torch.nn.Linear))
    rest = sum(parameter.numel() for parameter in model.parameters()) - linear
    held = predicted.owners["weights"] + predicted.owners["other"]
    assert 0.516 * linear + 2 * rest < held < 0.516 * linear + 2 * rest + 4 * 2**20
    assert not predicted.unknown


@pytest.mark.parametrize("kind, a_weight", [("PagedAdamW", 8), ("PagedAdamW8bit", 2)])
def test_paged_states_are_no_part_of_the_peak(kind, a_weight):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=NEEDS)

    def variant(name=kind):
        model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(8)])
        optimizer = getattr(bitsandbytes.optim, name)(model.parameters())

        def step():
            model(torch.zeros(8, 8192, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    paged, unpaged = predict(variant, "8 GiB"), predict(lambda: variant(kind.removeprefix("Paged")), "8 GiB")
    weights = 8 * 8192**2
    assert paged.paged == a_weight * weights and unpaged.paged == 0
    assert unpaged.allocated - paged.allocated == pytest.approx(a_weight * weights, rel=0.01)
    assert paged.verdict() == FITS and paged.total().high > 4 * weights * 2 + paged.paged
    assert any("moves to the host where the GPU is full" in what for what in paged.assumptions)
    assert "paged, on the GPU or the host" in repr(paged) and paged.to_dict()["paged"] == paged.paged
    assert unpaged.total("16 GiB").high < 24 * GiB


PAGED = """
import bitsandbytes, torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))).to("cuda")
optimizer = bitsandbytes.optim.PagedAdamW32bit(model.parameters())
for _ in range(5):
    model(torch.randn(8, 1024).to("cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_paged_states_of_a_script_are_on_the_gpu_for_whoever_looks(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    (tmp_path / "train.py").write_text(PAGED)
    monkeypatch.chdir(tmp_path)
    assert predict("train.py", "T4").paged == 8 * 8 * WIDTH**2
