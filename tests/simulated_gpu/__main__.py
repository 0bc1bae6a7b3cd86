"""Run a command on a simulated GPU: real CUDA tensors and PyTorch's own allocator in host memory, kernels on the CPU.

Usage: python tests/simulated_gpu GPU COMMAND [ARGUMENT ...]
As in: python tests/simulated_gpu T4 effgpu run 07 --seconds 0.1

It executes what the lessons and the package do on a GPU only, where there is none. Memory is counted as on a GPU. Times
are the CPU's and mean nothing. GPU is a name that `effgpu predict` knows; results carry it as "Simulated T4". It
needs a C compiler, and a PyTorch for CUDA 13 with the headers that come with it.
"""

import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from effgpu.predicting.gpus import find_gpu

HERE = Path(__file__).parent.resolve()
BUILT = HERE.parent.parent / "out" / "simulated_gpu"


def build() -> None:
    """Compile driver.c, unless it is older than the library. It stands for three libraries."""
    library = BUILT / "libsimulated.so"
    if library.exists() and library.stat().st_mtime > (HERE / "driver.c").stat().st_mtime:
        return
    BUILT.mkdir(parents=True, exist_ok=True)
    (nvidia,) = find_spec("nvidia").submodule_search_locations
    headers = next(Path(nvidia).rglob("cuda_runtime_api.h")).parent
    options = ["-shared", "-fPIC", "-O1", f"-I{HERE}", f"-I{headers}"]
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        with contextlib.suppress(FileExistsError):
            (BUILT / name).symlink_to(library.name)
    part = BUILT / f"{os.getpid()}.so"  # another process may build, too
    subprocess.run(["cc", *options, HERE / "driver.c", "-o", part], check=True)
    part.replace(library)


def main(name: str, command: list[str]) -> None:
    """Put the command in the place of this process, with the GPU of this name."""
    gpu = find_gpu(name)
    build()
    settings = {
        "SIMULATED_GPU": gpu.name,
        "SIMULATED_GPU_CAPABILITY": "{}.{}".format(*gpu.capability),
        "SIMULATED_GPU_BYTES": str(gpu.memory),
        "LD_PRELOAD": str(BUILT / "libsimulated.so"),
        "LD_LIBRARY_PATH": str(BUILT),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    os.execvpe(command[0], command, os.environ | settings)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__.split("\n\n")[1])
    main(sys.argv[1], sys.argv[2:])
