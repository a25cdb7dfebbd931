"""Finds required libraries that are missing, with Python's own modules only, and says how to install them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

DISTRIBUTION: Final = "notebook-accel"
_MODULES: Final = {"pyyaml": "yaml"}
"""Names of modules that differ from those of their distributions in more than `-` and `_`."""
_REQUIREMENT: Final = r"([\w.-]+)([^;]*)(;.*)?"


def find_missing() -> list[str]:
    """Return the requirements of this package that cannot be imported, such as `rich-click>=1.9.3`.

    Only `ruamel`, a folder without code, is imported for that. Nothing is known, and the list empty, if this package is
    not installed but on the path only.
    """
    return [text for text in _list_all() if not _is_here(_split(text)[0])]


def _list_all() -> list[str]:
    """Return the requirements of this package that no extra adds."""
    import re  # here: these take longer to import than all that the package itself imports
    from importlib import metadata

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    parts = [found.groups() for line in lines if (found := re.match(_REQUIREMENT, line))]
    return [f"{name}{versions.strip()}" for name, versions, marker in parts if not marker]


def describe(missing: Sequence[str]) -> str:
    """Return the sentence about missing requirements.

    Args:
        missing: as `find_missing` returns them, at least one.
    """
    names = [_split(text)[0] for text in missing]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    wanted = " ".join(f"'{text}'" for text in missing)
    verb = "are" if len(names) > 1 else "is"
    return f"notebook_accel needs {listed}, which {verb} not installed: pip install {wanted}"


def describe_broken(error: BaseException) -> str:
    """Return the sentence about the requirement whose own import raised an error, empty where none did.

    Args:
        error: what an import raised.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = next((name for name in reversed(names) if not name.startswith("importlib.")), "")
    for text in _list_all():
        if _names(text, raised_in):
            reason = f"{type(error).__name__}: {error}"
            return f"{_split(text)[0]} cannot be imported ({reason}): pip install --force-reinstall '{text}'"
    return ""


def is_of_missing(error: ImportError) -> bool:
    """Return True if an import failed because a requirement is missing.

    Args:
        error: what the import raised.
    """
    return isinstance(error, ModuleNotFoundError) and any(
        _names(text, error.name or "") for text in find_missing()
    )


def require(names: Iterable[str]) -> None:
    """Raise ImportError where required libraries are not installed; none is imported, and those of all are named.

    Args:
        names: of the libraries that are looked for.
    """
    if not all(map(_is_here, names)):
        raise ImportError(describe(find_missing() or list(names)))


@contextlib.contextmanager
def explain_missing() -> Iterator[None]:
    """Raise an import that fails for want of a requirement as one sentence about all that are missing.

    Raises:
        ImportError: a requirement is missing, or torch is not PyTorch. What fails for another reason stays as it is.
    """
    __tracebackhide__ = True
    if impostor := find_impostor():
        raise ImportError(impostor, name="torch")
    try:
        yield
    except ModuleNotFoundError as error:
        if not is_of_missing(error):
            raise
        raise ImportError(describe(find_missing()), name=error.name) from None


def find_impostor() -> str:
    """Return a sentence where the module that is found as torch is another one of that name, empty where it is not."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # it has no spec
        return ""
    if spec is None or spec.origin is None:
        return ""
    if any(
        os.path.exists(os.path.join(place, "distributed")) for place in spec.submodule_search_locations or ()
    ):
        return ""
    return f"the module torch, {spec.origin}, is not PyTorch: rename it, and start again"


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(module_of(name)) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
    except ValueError:  # tests and notebooks put modules without a spec into sys.modules
        return True


def _names(requirement: str, module: str) -> bool:
    """Return whether a module is one of a requirement, or a package around it."""
    own = module_of(_split(requirement)[0])
    return f"{own}.".startswith(f"{module}.") or module.startswith(f"{own}.")


def module_of(name: str) -> str:
    """Return the name of the module of a requirement."""
    return _MODULES.get(name, name.replace("-", "_"))


def _split(requirement: str) -> tuple[str, str]:
    import re

    found = re.match(_REQUIREMENT, requirement)
    return (found[1], found[2]) if found else (requirement, "")
