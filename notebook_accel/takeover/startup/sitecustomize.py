"""Takes over from Accelerate as a Python process starts, where its environment says so."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "notebook_accel"
_PLACE = os.path.join(os.sep, _PACKAGE, "takeover", "startup")
_OLDEST = (3, 10)


def take_over() -> None:
    """Import the package that this file is of, which reads the variable; it need not be where modules are found."""
    if _PACKAGE in sys.modules:
        return
    path = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "__init__.py")
    spec = importlib.util.spec_from_file_location(_PACKAGE, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_PACKAGE]
        raise


def run_next() -> None:
    """Run the module of this name that Python would have found without this folder."""
    others = [folder for folder in sys.path if not os.path.abspath(folder).endswith(_PLACE)]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        run_next()
    finally:
        if sys.version_info >= _OLDEST:  # PYTHONPATH also reaches the older Pythons of other programs
            take_over()
