"""Checkpoints: files that survive a crash at any instant, and what they hold.

Its modules are attributes, each imported when it is asked for: a run that saves nothing does without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..takeover.names import complete_names

if TYPE_CHECKING:
    from . import background, folder, names, parts, plain, read, sharded, shards, write

__all__ = ["background", "folder", "names", "parts", "plain", "read", "sharded", "shards", "write"]


def __getattr__(name: str) -> Any:
    """Import a module of the package when it is asked for."""
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


complete_names(__name__)
