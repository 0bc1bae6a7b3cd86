"""What Python runs at its start under `effgpu bench`: once a process has PyTorch, the bench sees its steps.

So a command runs as it is, through any launcher. It costs a process without PyTorch nothing but this file.
"""

import os
import sys
from importlib import import_module


class _OncePyTorchIsThere:
    """Finds nothing itself; calls `attach` when the module `torch` has been run.

    A library may look for PyTorch long before it imports it, so this stays until then.
    """

    looks = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.looks:
            return None
        from importlib.util import find_spec

        self.looks = True
        try:
            spec = find_spec(name)
        finally:
            self.looks = False
        run = getattr(getattr(spec, "loader", None), "exec_module", None)
        if run is not None:

            def run_and_attach(module):
                sys.meta_path.remove(self)
                run(module)
                _attach()

            spec.loader.exec_module = run_and_attach
        return spec


def _attach():
    try:
        from effgpu.attaching import marking

        marking.attach()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(f"effgpu: {sys.executable} cannot show its steps to the bench ({text})", file=sys.stderr)


def _run_the_next():
    """Run the `sitecustomize` that this one hides, if there is one; and be no part of the script's path."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if not place or os.path.abspath(place) != own]
    this = sys.modules.pop(__name__)
    try:
        import_module(__name__)
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault(__name__, this)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _OncePyTorchIsThere())
    _run_the_next()
