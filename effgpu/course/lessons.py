"""The lessons as files: which there are, and of which code and device the outputs are that they store."""

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from effgpu.measuring.device import Device

LESSONS = Path(__file__).parents[2] / "notebooks"  # in a clone of the repository


def find_lessons(names: Sequence[str] = ()) -> list[Path]:
    """Return the paths of lessons given as a path, `02_dataloader.ipynb`, `02_dataloader`, `02` or `dataloader`.

    Without names, returns all. Looks in ./notebooks, else in the clone that the package is from. Raises ValueError for
    an unknown name, and if there are no lessons.
    """
    here = sorted(Path("notebooks").glob("*.ipynb")) or sorted(LESSONS.glob("*.ipynb"))
    if not names and not here:
        raise ValueError(f"no lessons in ./notebooks nor in {LESSONS}: run effgpu in a clone of it, or name a path")
    known = {alias: path for path in here for alias in (path.name, path.stem, *path.stem.split("_", 1))}
    known |= {name: Path(name) for name in names if name.endswith(".ipynb") and Path(name).is_file()}
    if unknown := [name for name in names if name not in known]:
        stems = ", ".join(path.stem for path in here) or "none"
        raise ValueError(f"unknown lesson {unknown[0]!r}; known: {stems}")
    return list(dict.fromkeys(known[name] for name in names)) if names else here


@dataclass(frozen=True)
class Origin:
    """Where a lesson's outputs are from: the device's slug, and a digest of the code cells."""

    device: str
    code: str


def find_origin(path: Path) -> Origin | None:
    """Where the stored outputs of a lesson are from; None for one that has none, or does not say."""
    import nbformat

    with contextlib.suppress(Exception):  # nbformat raises errors of many types
        return Origin(**nbformat.read(path, as_version=4).metadata["effgpu"])


def digest(notebook) -> str:
    """A digest of a notebook's code cells: outputs with another one are of other code."""
    return hashlib.sha256("\n\n".join(cell.source for cell in code_cells(notebook.cells)).encode()).hexdigest()[:16]


def is_missing(path: Path, device: Device) -> bool:
    """Whether a lesson stores no outputs of the code that it has now; or, on a GPU, none of this one."""
    import nbformat

    origin = find_origin(path)
    if origin is None or origin.code != digest(nbformat.read(path, as_version=4)):
        return True
    return device.kind == "cuda" and origin.device != device.slug


def lessons_of_gpus(lessons: Iterable[Path]) -> list[str]:
    """The names of lessons that store a GPU's outputs of the code that they have now."""
    origins = {path: find_origin(path) for path in lessons}
    on_gpu = [path for path, origin in origins.items() if origin and not origin.device.startswith("cpu-")]
    return [path.stem for path in on_gpu if not is_missing(path, Device("", "cpu", None, 1))]


def code_cells(cells: Iterable) -> list:
    """The cells of code that hold some."""
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
