"""What may be asked of the step that fine-tunes a model: its names, and checks that need no PyTorch."""

from numbers import Integral

from effgpu.units import check_positive

PRECISIONS = ("mixed", "pure", "tf32", "fp32")
OPTIMIZERS = ("adamw", "sgd", "momentum", "adafactor")


def check(
    batch: int,
    length: int | None = None,
    lora: int | None = None,
    four_bits: bool = False,
    optimizer: str = "adamw",
    precision: str = "mixed",
    **_: object,
) -> None:
    """Raise ValueError for what `fine_tuning` does not take, whatever the model."""
    for name, value, known in (("optimizer", optimizer, OPTIMIZERS), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    given = {"batch": batch, "length": length, "lora": lora}
    check_positive(Integral, **{name: value for name, value in given.items() if value is not None})
    if four_bits and lora is None:
        raise ValueError("four_bits: expected lora, too: weights of 4 bits are not trained")
