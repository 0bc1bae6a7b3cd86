"""What a network would give, saved by the tests: models with random weights, their tokenizer, texts and images."""

from pathlib import Path

import torch
import transformers
from torchvision.models import ResNet18_Weights, resnet18
from torchvision.utils import save_image

from effgpu.course import corpus, hub

NAMES = {"YELP": "texts", "CIFAR": "images", "DISTILBERT": "bert", "DISTILGPT2": "gpt2", "QWEN": "qwen"}
GPT2 = {"vocab_size": 1000, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2}
QWEN = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
BERT = {"vocab_size": 1000, "dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2}


def save(folder: Path) -> dict[str, str]:
    """Save a folder for each name of `hub`, and the weights of a ResNet-18. Returns the folders."""
    tokenizer = corpus.load_tokenizer(1000)
    tokenizer.eos_token = "[PAD]"
    torch.manual_seed(0)
    models = {
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
        "qwen": transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(**QWEN, num_attention_heads=2, num_key_value_heads=1, dtype="bfloat16")
        ).bfloat16(),
        "bert": transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**BERT)),
    }
    for name, model in models.items():
        for parameter in model.parameters():  # those of a new model are small, and biases 0: mistakes would hide
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    hub.load_texts(None, train=4000, test=2000).save_to_disk(folder / "texts")
    for number in range(8):
        image, label = corpus.Glyphs(8, size=16)[number]
        path = folder / "images" / ("train" if number < 5 else "test") / str(label % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_image(image, path)
    checkpoints = folder / "hub" / "checkpoints"  # where TORCH_HOME is this folder
    checkpoints.mkdir(parents=True)
    torch.save(resnet18().state_dict(), checkpoints / Path(ResNet18_Weights.DEFAULT.url).name)
    return {name: str(folder / saved) for name, saved in NAMES.items()}
