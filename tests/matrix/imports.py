"""Imports all modules of the package, in this Python: `python -m tests.matrix.imports`."""

from __future__ import annotations

import importlib

from tests.structure.source import modules


def main() -> None:
    """Import each module that may be imported."""
    for module in modules():
        if not module.name.endswith(("__main__", "sitecustomize")):
            importlib.import_module(module.name)


if __name__ == "__main__":
    main()
