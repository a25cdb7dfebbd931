"""What is installed: answered without importing a library and without initialising a device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache

_DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn", "PIL": "pillow"}


@cache
def is_available(name: str) -> bool:
    """Return True if the top-level module `name` can be imported; it is looked up, not imported.

    A folder without code is none: wandb, for one, leaves a folder `wandb` beside the notebook.
    """
    if "." in name:
        raise ValueError(f"is_available takes a top-level module, not {name!r}")
    try:
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None
    except ValueError:  # a module in sys.modules without a spec, as tests and notebooks make them
        return True


@cache
def version(name: str) -> str | None:
    """Return the installed version of a distribution, None if it is absent."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def at_least(name: str, minimum: str) -> bool:
    """Return True if distribution `name` is installed in version `minimum` or later.

    A development or local build counts as the release that it leads to: 2.9.0a0+git1 is at least 2.9.
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
