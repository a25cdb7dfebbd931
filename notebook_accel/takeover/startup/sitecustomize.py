"""Takes over from Accelerate as a Python process starts, where its environment says so."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_PACKAGE = "notebook_accel"


def take_over() -> None:
    """Import the package that this file is of, which reads the variable; it need not be where modules are found."""
    sys.path.insert(0, _ROOT)
    try:
        importlib.import_module(_PACKAGE)
    finally:
        sys.path.remove(_ROOT)


def run_next() -> None:
    """Run the module of this name that Python would have found without this folder."""
    others = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    run_next()
    take_over()
