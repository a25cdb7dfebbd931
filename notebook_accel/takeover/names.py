"""Lets modules here have the names of Accelerate's modules at the same path, also those that are elsewhere here."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from .. import collector
from . import paths

_OURS: Final = __name__.partition(".")[0]


def complete_names(module_name: str) -> None:
    """Let a module find names that it does not have itself: each is imported when it is first asked for.

    They are those that the take-over serves at the same path, so that code for Accelerate needs another word in its
    imports and nothing else.

    Args:
        module_name: its `__name__`; it calls this at its end.
    """
    module = sys.modules[module_name]
    path = module_name.partition(".")[2]
    get_own = vars(module).get("__getattr__")

    def get(name: str) -> Any:
        found = paths.find(path, name)
        if found is None and get_own is not None:
            return get_own(name)
        if found is None:
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}", name=name, obj=module)
        with collector.pause():
            value = getattr(importlib.import_module(f"{_OURS}.{found[0]}"), found[1])
        return vars(module).setdefault(name, value)

    def list_names() -> list[str]:
        return sorted({*vars(module), *paths.names_of(path)})

    setattr(module, "__getattr__", get)  # noqa: B010  # mypy takes no assignment
    setattr(module, "__dir__", list_names)  # noqa: B010


def run_command(*words: str) -> Any:
    """Run the command of this package with these words and those of the command line."""
    return importlib.import_module(f"{_OURS}.cli.main").main([*words, *sys.argv[1:]])
