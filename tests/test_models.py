"""A model by its name: the step that fine-tunes it, from a folder with a config.json, and `effgpu predict --model`."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import effgpu
from effgpu.__main__ import main
from effgpu.diagnosing import model as diagnosing
from effgpu.diagnosing.causes import LAUNCHING, PRECISION, TF32
from effgpu.diagnosing.diagnosis import Diagnosis, Finding
from effgpu.diagnosing.model import _as_options
from effgpu.diagnosing.scripts import NO_LOADER
from effgpu.predicting import models
from effgpu.predicting.facts import UNTIMED, Fact

FOUND = Diagnosis("T4", 1.0, 1.0, 1.0, False, ())
transformers = pytest.importorskip("transformers")
WIDTH, LAYERS, WORDS = 64, 2, 500
ENCODER = dict(vocab_size=WORDS, dim=WIDTH, hidden_dim=4 * WIDTH, n_layers=LAYERS, n_heads=2)
DECODER = dict(vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=128)
LLAMA = dict(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "bert": transformers.DistilBertConfig(**ENCODER, architectures=["DistilBertForMaskedLM"]),
        "gpt2": transformers.GPT2Config(**DECODER, architectures=["GPT2LMHeadModel"]),
        "llama": transformers.LlamaConfig(**LLAMA, num_attention_heads=2, architectures=["LlamaForCausalLM"]),
        "t5": transformers.T5Config(vocab_size=WORDS, d_model=WIDTH, d_kv=32, d_ff=128, num_layers=1, num_heads=2),
        "vit": transformers.ViTConfig(hidden_size=WIDTH, num_hidden_layers=1),
    }
    for name, config in configs.items():
        config.save_pretrained(folder / name)
    (folder / "empty").mkdir()
    return folder


def predict(folder, name, gpu="A100 80 GB", **how):
    return effgpu.predict(effgpu.fine_tuning(str(folder / name), **{"batch": 2, "length": 32} | how), gpu)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_weights_gradients_and_state_are_those_of_the_model_that_the_config_describes(folder, name):
    kind = {"bert": "SequenceClassification", "t5": "Seq2SeqLM"}.get(name, "CausalLM")
    config = transformers.AutoConfig.from_pretrained(folder / name)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    for optimizer, states in {"adamw": 2, "momentum": 1, "sgd": 0}.items():
        predicted = predict(folder, name, optimizer=optimizer, precision="fp32")
        assert predicted.owners["weights"] == pytest.approx(4 * numbers, rel=0.05)
        assert predicted.owners["optimizer state"] == pytest.approx(4 * states * numbers, rel=0.05)
    pure = predict(folder, name, precision="pure").owners["weights"]
    assert pure == pytest.approx(2 * numbers, rel=0.05)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_adapters_leave_the_state_of_a_small_part_and_4_bits_a_quarter_of_its_weights(folder, name):
    full, lora = predict(folder, name), predict(folder, name, lora=4)
    four = predict(folder, name, lora=4, four_bits=True)
    assert lora.owners["optimizer state"] < full.owners["optimizer state"] / 4
    assert lora.owners["weights"] < 0.65 * full.owners["weights"], "frozen weights are in 16 bits"
    assert four.resting < lora.resting


@pytest.mark.parametrize("optimizer, state", [("adamw", 8), ("momentum", 4), ("sgd", 0), ("adafactor", 1)])
def test_what_a_scaler_meets_of_adapters_and_classifier_is_trained_in_32_bits(folder, optimizer, state):
    config = transformers.AutoConfig.from_pretrained(folder / "bert")
    network = models._choose_kind(config).from_config(config, dtype=torch.float16)
    models._add_adapters(network, 4, False, torch.float32)
    trained = {parameter.dtype: parameter.requires_grad for parameter in network.parameters()}
    assert trained == {torch.float16: False, torch.float32: True}
    predicted = predict(folder, "bert", "T4", lora=4, optimizer=optimizer)  # in fp16, with a scaler
    numbers = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    padded = 512 * len(list(network.parameters()))  # each tensor of the state takes whole 512 bytes
    assert state * numbers <= predicted.owners["optimizer state"] <= state * (numbers + padded)


def test_a_weight_of_4_bits_takes_052_bytes_and_is_unpacked_once_in_each_pass(folder):
    layer = torch.nn.Linear(256, 512, bias=False)
    four = models._FourBits(layer, 256, 512)
    assert sum(buffer.nbytes for buffer in four.buffers()) == pytest.approx(0.516 * layer.weight.numel(), rel=0.001)
    x = torch.randn(4, 256, dtype=four.dtype, requires_grad=True)
    kept = effgpu.saved_bytes(lambda: four(x))
    assert kept <= four.packed.nbytes + x.nbytes, "the unpacked weights are not kept"
    assert four(x).shape == (4, 512)
    four(x).float().sum().backward()
    assert x.grad.shape == x.shape


def test_only_adapters_and_a_new_classifier_learn(folder):
    for name, head in (("bert", {"classifier.weight", "classifier.bias"}), ("gpt2", set())):
        config = transformers.AutoConfig.from_pretrained(folder / name)
        network = models._choose_kind(config).from_config(config)
        models._add_adapters(network, 4, False, torch.float32)
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        assert {each for each in trained if not each.endswith((".up", ".down"))} - {
            "pre_classifier.weight",
            "pre_classifier.bias",
        } == head
        adapters = [module for module in network.modules() if isinstance(module, models._Adapter)]
        assert len(adapters) == LAYERS * (6 if name == "bert" else 4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("how", [{}, {"lora": 2}, {"lora": 2, "four_bits": True}, {"checkpointing": True}])
def test_the_step_runs_on_this_device_too(folder, name, how):
    step = effgpu.fine_tuning(str(folder / name), batch=2, length=8, **how)()
    step()
    step()


@pytest.mark.filterwarnings("error::FutureWarning")  # of an old name of transformers, at each walk
def test_checkpointing_keeps_less(folder):
    without, kept = (predict(folder, "llama", batch=16, length=64, checkpointing=on).allocated for on in (False, True))
    assert kept < 0.8 * without


@pytest.fixture(scope="module")
def predicted(folder):
    return predict(folder, "bert", "T4")


@given(samples=st.integers(1, 10**7), price=st.floats(0.01, 100))
def test_an_epochs_cost_is_its_hours_times_the_price(predicted, samples, price):
    found = models.ModelPrediction(predicted, 2, {}, samples, price)
    steps = -(-samples // 2)
    assert found.epochs["T4"][0] == pytest.approx(steps * predicted.time("T4").expected)
    assert found.cost("T4") == pytest.approx([price * seconds / 3600 for seconds in found.epochs["T4"]])


def test_where_a_part_of_the_time_is_not_known_an_epoch_and_its_cost_are_at_least_so_much(predicted):
    found = models.ModelPrediction(replace(predicted, said=(Fact(UNTIMED, "what a kernel takes"),)), 2, {}, 100, 1.0)
    (gpu,) = [gpu for gpu in found.to_dict()["gpus"] if gpu["name"] == "T4"]
    for each in (gpu["time"], gpu["epoch"], gpu["cost"]):
        assert each["expected"] is each["high"] is None and each["low"] > 0
    (row,) = [row for row in found._rows() if row[0] == "T4"]
    assert all(cell.startswith("at least ") for cell in row[1:])


def test_the_table_and_the_json_say_the_same(folder, tmp_path, capsys):
    asked = ["predict", "--model", str(folder / "bert"), "--batch", "4", "--length", "64", "--gpu", "T4"]
    asked += ["--samples", "1000", "--price", "0.35", "--lora", "--json", str(tmp_path / "found.json")]
    assert main(asked) == 0
    told, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
    (gpu,) = found["gpus"]
    variant_of = partial(effgpu.fine_tuning, str(folder / "bert"), length=64, lora=8)
    largest = effgpu.largest(variant_of, "T4")
    assert gpu["largest_batch"] == {"fits": largest.fits, "may_fit": largest.may_fit}
    assert f"{largest.fits}" in told and "an epoch of 1,000 texts" in told and "its cost" in told
    assert gpu["cost"]["high"] == pytest.approx(0.35 * gpu["epoch"]["high"] / 3600)
    assert gpu["epoch"]["expected"] == pytest.approx(250 * gpu["time"]["expected"])


def test_exit_codes_say_whether_it_fits(folder, capsys):
    asked = ["predict", "--model", str(folder / "bert"), "--batch", "4", "--gpu"]
    assert main([*asked, "T4"]) == 0
    assert main([*asked, "0.05 GiB"]) == 3
    assert main(asked[:-1]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--model", "{}/bert"], "--batch"),
        (["--model", "{}/bert", "--batch", "0"], "batch: expected"),
        (["--model", "{}/bert", "--batch", "2", "--length", "513"], "length: expected at most 512 tokens"),
        (["--model", "{}/bert", "--batch", "2", "--length", "0"], "length: expected"),
        (["--model", "{}/bert", "--batch", "2", "--lora", "0"], "lora: expected"),
        (["--model", "{}/bert", "--batch", "2", "--4bit"], "four_bits: expected lora"),
        (["--model", "{}/bert", "--batch", "2", "--optimizer", "adam"], "optimizer: expected one of adamw"),
        (["--model", "{}/bert", "--batch", "2", "--precision", "fp8"], "precision: expected one of mixed"),
        (["--model", "{}/bert", "--batch", "2", "--price", "1"], "price: expected samples"),
        (["--model", "{}/bert", "--batch", "2", "--gpu", "T5"], "T5"),
        (["--model", "{}/vit", "--batch", "2"], "expected a model of texts"),
        (["--model", "{}/empty", "--batch", "2"], "expected a name on the Hugging Face Hub or a folder"),
        (["--model", "{}/bert", "--batch", "2", "train.py"], "--model: expected no command"),
        (["--model", "{}/bert", "--batch", "2", "--trace", "step.json"], "--trace: expected a command"),
        (["--lora", "8", "train.py"], "expected --model"),
        ([], "expected a command"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "doctor"])
def test_what_is_wrong_is_refused_in_one_line(folder, command, asked, told, capsys):
    if command == "doctor" and "--price" in asked:
        pytest.skip("a price is predict's")
    assert main([command, *(word.format(folder) for word in asked)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert told in error[-1] and error[-1].startswith("effgpu: error: "), error


@pytest.mark.parametrize("asked", [["--loader", "batches"], ["--batch", "8"]])
def test_doctor_refuses_what_a_model_and_what_a_script_does_not_take(folder, asked, capsys):
    model = ["--model", str(folder / "bert"), "--batch", "2"] if "--loader" in asked else ["train.py"]
    assert main(["doctor", *model, *asked]) == 2
    assert asked[0] in capsys.readouterr().err


def test_doctor_says_what_holds_a_model_back_and_follows_its_options(tmp_path, capsys):
    """In fp32, 16 bits come first, and what they save is what the step in 16 bits takes less."""
    wide = ENCODER | {"dim": 512, "hidden_dim": 2048}
    transformers.DistilBertConfig(**wide, architectures=["DistilBertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    size = {"batch": 64, "length": 256, "precision": "fp32"}
    asked = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "found.json"
    assert main(["doctor", "--model", str(tmp_path / "bert"), *asked, "--gpu", "T4", "--json", str(out)]) == 0
    assert "precision" in capsys.readouterr().out
    found = json.loads(out.read_text())
    in_32, in_16 = (predict(tmp_path, "bert", "T4", **size | how) for how in ({}, {"precision": "mixed"}))
    in_32, in_16 = (predicted.time("T4").expected for predicted in (in_32, in_16))
    assert found["seconds"] == pytest.approx(in_32, rel=0.05)
    assert found["findings"][0]["name"] == "precision" and found["findings"][0]["advice"] == "--precision mixed"
    assert found["notes"][-1] == "a model alone has no texts to load: what loading takes was not looked at"
    assert not any("the script" in note for note in found["notes"])
    assert found["findings"][0]["seconds"] == pytest.approx(in_32 - in_16, rel=0.15)


def test_options_are_advised_in_place_of_lines_also_where_two_hide_each_other():
    lines = {PRECISION: "with torch.autocast(...); fp16 needs a GradScaler", TF32: "high", LAUNCHING: "a larger batch"}
    ones = {name: Finding(name, 0.1, 0.1, 0.1, advice=advice) for name, advice in lines.items()}
    pair = Finding("both", 0.1, 0.1, 0.1, advice=f"{lines[LAUNCHING]}; {lines[PRECISION]}")
    found = Diagnosis("T4", 1.0, 1.0, 1.0, False, tuple(ones.values()), hidden=(pair,), notes=(NO_LOADER,))
    advised = _as_options(found, "fp32")
    assert [one.advice for one in advised.examined] == ["--precision mixed", "--precision tf32", "a larger batch"]
    assert advised.hidden[0].advice == "a larger batch; --precision mixed" and NO_LOADER not in advised.notes
    assert _as_options(found, "mixed").examined[0].advice == lines[PRECISION]  # what is left is no option's


def test_a_model_is_called_by_its_name_where_it_is_slow_or_fails(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(diagnosing, "diagnose_script", lambda program, *_, **__: asked.append(str(program)) or FOUND)
    diagnosing.diagnose_model(str(folder / "bert"), "T4", batch=2)
    assert asked == [f"the fine-tuning of {folder / 'bert'}"]


def test_without_a_network_a_name_is_refused_with_what_to_do(monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    assert main(["predict", "--model", "some/name", "--batch", "2"]) == 2
    assert "some/name: its config is not in the cache" in capsys.readouterr().err


@pytest.mark.real
def test_a_name_on_the_hub_is_known_by_its_config_alone():
    found = effgpu.predict_model("distilbert/distilbert-base-uncased", batch=32, gpu="T4")
    assert found.predicted.owners["weights"] == pytest.approx(4 * 66.95e6, rel=0.01)
