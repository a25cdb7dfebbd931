"""Finds out which libraries are installed and whether IPython runs, importing nothing and initialising no device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import linecache
import re
import sys
from functools import cache
from typing import Any, Final

CELL: Final = re.compile(r"ipykernel_\d+|<ipython-input-|<string>")
"""Names of files that Python gives to the code of cells."""
_DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn", "PIL": "pillow"}


@cache
def is_available(name: str) -> bool:
    """Return True if a module can be imported; the module is not imported.

    A folder without code does not count. For example, wandb leaves a folder `wandb` beside the notebook.

    Args:
        name: of a top-level module.

    Raises:
        ValueError: the name has dots.
    """
    if "." in name:
        raise ValueError(f"is_available takes a top-level module, not {name!r}")
    try:
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    except ValueError:  # tests and notebooks put modules without a spec into sys.modules
        return True


def has_torch() -> bool:
    """Return whether torch is imported, to its end; a module of that name beside the notebook is not torch."""
    torch = sys.modules.get("torch")
    is_being_imported = getattr(getattr(torch, "__spec__", None), "_initializing", False)
    return hasattr(torch, "distributed") and not is_being_imported


@cache
def has_module(name: str) -> bool:
    """Return True if a module inside a package can be imported. The packages around it are imported, it is not.

    Args:
        name: such as `google.colab`.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a package around it
        return False
    except ValueError:  # as above
        return True


@cache
def version(name: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed.

    Args:
        name: of the distribution, or of its module: `yaml`, `sklearn` and `PIL`.
    """
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def at_least(name: str, minimum: str) -> bool:
    """Return True if a distribution is installed in some version or a later one.

    A development or local build counts as the release that follows it: 2.9.0a0+git1 is at least 2.9.

    Args:
        name: see `version`.
        minimum: the version, such as `2.9`.
    """
    from packaging.version import InvalidVersion, Version

    wanted = Version(minimum)
    installed = version(name)
    if installed is None:
        return False
    try:
        return Version(Version(installed).base_version) >= wanted
    except InvalidVersion:
        return False


def is_rich_available() -> bool:
    """Return True if rich is installed."""
    return is_available("rich")


def find_shell() -> Any:
    """Return the shell of IPython that runs this process's code, or None."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def find_kernel_shell() -> Any:
    """Return the shell of the running IPython kernel, or None: IPython in a terminal cannot update displays."""
    shell = find_shell()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def is_cell(filename: str) -> bool:
    """Return whether a file name is one that Python gives to the code of a cell.

    Args:
        filename: `co_filename` of a code object.
    """
    return bool(CELL.search(filename))


def describe_file(filename: str) -> str:
    """Return how messages name a file.

    Args:
        filename: `co_filename` of a code object.

    Returns:
        `cell In[3]` for the code of a cell, `a cell` if its number is not known, else the file name.
    """
    if not CELL.search(filename):
        return filename
    numbers = getattr(getattr(find_shell(), "compile", None), "_filename_map", {})
    return f"cell In[{numbers[filename]}]" if filename in numbers else "a cell"


def describe_line(filename: str, line: int) -> str:
    """Return how messages name a line, with the code on it where that is known: `cell In[3], line 1 (train())`."""
    code = linecache.getline(filename, line).strip()
    return f"{describe_file(filename)}, line {line}" + (f" ({code:.80})" if code else "")


def find_widgets_problem() -> str:
    """Import ipywidgets, and return why that fails: it is broken, or another module has its name; empty if it works."""
    try:
        import ipywidgets
    except Exception as error:  # a broken installation raises anything
        said = " ".join(str(error).split())
        return f"{type(error).__name__}: {said}" if said else type(error).__name__
    return "" if hasattr(ipywidgets, "VBox") else f"{ipywidgets.__file__} is another module of that name"
