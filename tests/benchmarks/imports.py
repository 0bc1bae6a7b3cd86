"""What `import effgpu`, and the first use of its measuring half, cost on top of `import torch`.

Usage: python tests/benchmarks/imports.py
"""

import statistics
import subprocess
import sys

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
    """Print the median of each way, taken in turns."""
    taken = {name: [] for name in WAYS}
    for _ in range(11):
        for name, statement in WAYS.items():
            taken[name].append(seconds(statement))
    for name, times in taken.items():
        print(f"{name:24}{statistics.median(times):.3f} s")


if __name__ == "__main__":
    main()
