"""Write docs/predict.md: published peaks and times of training steps beside predicted ones. It takes ten minutes.

PYTHONPATH=tests python -m benchmarks.predictions
"""

import sys
import warnings
from pathlib import Path

import torch
from benchmarks import published_memory, published_times

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"


def main() -> int:
    """Run both audits and write the page. Returns 1 for a false "fits"."""
    warnings.simplefilter("ignore")
    memory = published_memory.run_all()
    times = published_times.run_all()
    calibrating = published_times.run_all(calibrates=True)
    lines = [
        "# How far `effgpu predict` can be trusted",
        "",
        "Each run was rebuilt from its publication as a variant, in `tests/benchmarks/`, and predicted without a GPU,",
        f"with PyTorch {torch.__version__.partition('+')[0]}. `make predictions` writes this page.",
        "",
        *published_times.tell(times, calibrating),
        *published_memory.tell(memory),
    ]
    PAGE.write_text("\n".join(lines), encoding="utf-8")
    return int(any(outcome.is_false_fit for outcome in memory))


if __name__ == "__main__":
    sys.exit(main())
