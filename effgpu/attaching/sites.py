"""Whose code is running: the line of the reader's own files, not one of PyTorch's, a library's or effgpu's."""

import ast
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple

_TORCH, _EFFGPU = (
    str(Path(file).parent) + os.sep for file in (find_spec("torch").origin, Path(__file__).parent)
)  # PyTorch is looked for, not loaded: who asks for a script's process does without it
_COURSE = f"{_EFFGPU}course{os.sep}"  # stands for a reader
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = "site-packages", "dist-packages"
_TYPED = "<stdin>", "<string>", "<ipython-input"
_CYTHON = ".pyx", ".pxd", ".pxi"  # end the names of files that Cython compiled, often from below another folder
_CELLS = "ipykernel", "ipython-input"  # in the names of files that hold a notebook's cells, on Colab too
READER, LIBRARY, TORCH, OTHER = "reader", "library", "torch", "other"


class Site(NamedTuple):
    """A line of the reader's code. `inside` is the line of the library that it called, where that one asked."""

    file: str
    line: int
    inside: str = ""

    @property
    def place(self) -> str:
        """The file's name and the line's number."""
        return f"{name_file(self.file)}:{self.line}"

    @property
    def where(self) -> str:
        """The same, with the library's."""
        return self.place + f" (in {self.inside})" * bool(self.inside)

    @property
    def code(self) -> str:
        """What the line says; empty where that is not known."""
        linecache.checkcache(self.file)  # which may have changed since an earlier answer
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.where}: {code}" if (code := self.code) else self.where


def find_site(*, outermost: bool = False, until: tuple[CodeType, ...] = ()) -> Site | None:
    """The reader's line that is running: the innermost, or with `outermost` the one furthest out.

    What is further out than the innermost code of `until` is not looked at. Where no line is the reader's, that of the
    innermost library stands for it. None where there is neither, as in autograd's threads.
    """
    frame, found, library = sys._getframe(1), None, None
    while frame is not None:
        owner = whose(frame.f_code.co_filename)
        if owner is READER:
            inside = library.where if library and not outermost else ""
            found = Site(frame.f_code.co_filename, frame.f_lineno, inside)
            if not outermost:
                break
        elif owner is LIBRARY:
            library = library or Site(frame.f_code.co_filename, frame.f_lineno)
        if frame.f_code in until:
            break
        frame = frame.f_back
    return found or library


def asked_by_torch(parts: Sequence[str]) -> bool:
    """Whether a file of PyTorch with one of these names in its path runs further in than all that is not PyTorch's."""
    frame = sys._getframe(1)
    while frame is not None and (owner := whose(frame.f_code.co_filename)) in (TORCH, OTHER):
        file = frame.f_code.co_filename
        if owner is TORCH and any(part in Path(file).as_posix() for part in parts):
            return True
        frame = frame.f_back
    return False


def readers_frames() -> list[FrameType]:
    """The frames of the reader's code that are running, the innermost first."""
    return [frame for frame, _ in walk_stack(sys._getframe(1)) if whose(frame.f_code.co_filename) is READER]


@functools.cache
def whose(file: str) -> str:
    """Whose code a file holds: the reader's, a library's that is installed, PyTorch's, or another one's."""
    if file.startswith(_TORCH):
        return TORCH
    if file.startswith(_EFFGPU):
        return READER if file.startswith(_COURSE) else OTHER
    if any(part in _INSTALLED for part in Path(file).parts):
        return LIBRARY
    is_no_file = file.startswith("<") and not file.startswith(_TYPED)
    if is_no_file or file.startswith(_PYTHON) or file.endswith(_CYTHON):
        return OTHER
    return READER


def name_file(path: str) -> str:
    """The name of a file of code, as a reader knows it: of an installed library, from the library's folder on.

    A notebook's cell lies in a file with a number for its name. IPython's tracebacks call it `In[7]`, and so do we.
    """
    if (installed := _name_installed(path)) is not None:
        return installed
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if cell := shell and getattr(shell.compile, "format_code_name", lambda path: None)(path):  # since IPython 8
        return cell[1]
    return "cell" if any(part in path for part in _CELLS) else Path(path).name


@functools.cache
def _name_installed(path: str) -> str | None:
    """The name of an installed library's file, from the library's folder on; None for another file."""
    parts = Path(path).parts
    installed = next((number for number, part in enumerate(parts) if part in _INSTALLED), None)
    return None if installed is None else "/".join(parts[installed + 1 :])


def once_a_file(find: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that finds something in the code of a file: it is called again only where the file has changed."""
    remembered = functools.lru_cache(maxsize=64)(lambda file, version: find(file))
    return functools.wraps(find)(lambda file: remembered(file, _version(file)))


def _version(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None  # a cell, or text


def called_name(node: ast.AST) -> str:
    """The name of the function or method that a statement or an expression calls; empty where it calls none."""
    node = node.value if isinstance(node, ast.Expr) else node
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", ""))


def parse(file: str) -> ast.Module:
    """The code of a file; nothing where it cannot be read."""
    linecache.checkcache(file)
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])
