"""What `import effgpu`, and the first use of its measuring half, cost on top of `import torch`.

Usage: python tests/benchmarks/imports.py [TURNS]
"""

import statistics
import subprocess
import sys

TURNS = int(sys.argv[1]) if len(sys.argv) > 1 else 11
WAYS = {
    "import torch": "import torch",
    "import torch, effgpu": "import torch, effgpu",
    "and effgpu.compare": "import torch, effgpu; effgpu.compare",
    "and effgpu.plot": "import torch, effgpu; effgpu.compare; effgpu.plot",
}


def seconds(statement: str) -> float:
    """The seconds that a statement takes in a fresh interpreter."""
    code = f"import time; start = time.perf_counter()\n{statement}\nprint(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def main() -> None:
    """Print the median of each way, taken in turns, and how much more than torch alone each took."""
    taken = {name: [] for name in WAYS}
    for _ in range(TURNS):
        for name, statement in WAYS.items():
            taken[name].append(seconds(statement))
    alone = taken["import torch"]
    for name, times in taken.items():
        more = statistics.median(time - torch for time, torch in zip(times, alone))
        print(f"{name:24}{statistics.median(times):.3f} s, {more:+.3f} s over torch")


if __name__ == "__main__":
    main()
