"""How a function that is launched starts processes of its own: data loader workers, process pools."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

_PLATFORMS: Final = multiprocessing.get_all_start_methods()[0]
"""The platform's default; asked later, it may be what a worker was given."""
_CHANGING: Final = threading.Lock()
_BLOCKS: Final = "blocks_of_notebook_accel"
"""What multiprocessing's context has of us: blocks in which the default is another one, each with what was before."""

if hasattr(os, "register_at_fork"):  # not on Windows: another thread may hold the lock at a fork
    os.register_at_fork(after_in_child=_CHANGING._at_fork_reinit)  # type: ignore[attr-defined]


def choose_start_method() -> str | None:
    """Return how workers start processes of their own: as the user chose here, else by a fork on Linux.

    A process that is no fork cannot be given what is defined in a cell: it has no importable module. Since Python 3.14
    forks are no longer the default of Linux. Who chooses the default by hand cannot be told from who only asked for it,
    as data loaders do; both have forks.

    Returns:
        A start method of `multiprocessing`; None leaves the worker's default.
    """
    found = _find_context()
    method: str = (found._actual_context or found._default_context).get_start_method()
    if method != _PLATFORMS:
        return method
    return "fork" if sys.platform == "linux" else None


def set_default(method: str) -> None:
    """Let this process start others by a method that counts as the default: a function can choose another one.

    `multiprocessing.set_start_method` would choose it, and can be called once only.

    Args:
        method: a start method of `multiprocessing`.
    """
    found = _find_context()
    found._default_context, found._actual_context = multiprocessing.get_context(method), None


@contextlib.contextmanager
def start_as_in_workers() -> Iterator[None]:
    """Let this process start others in the block as a worker would, unless the block chooses another method.

    Blocks of several threads may overlap; all is as before when the last one ends.
    """
    found, block = _find_context(), object()
    blocks: list[tuple[object, Any, Any]] = vars(found).setdefault(_BLOCKS, [])
    with _CHANGING:
        default, chosen = found._default_context, found._actual_context
        method = choose_start_method()
        if blocks:
            blocks.append((block, *blocks[0][1:]))
        elif method not in (None, (chosen or default).get_start_method()):
            set_default(method)
            blocks.append((block, default, chosen))
    try:
        yield
    finally:
        with _CHANGING:
            for entry in [entry for entry in blocks if entry[0] is block]:
                blocks.remove(entry)
                if not blocks:
                    _restore(found, *entry[1:])


def _restore(found: Any, default: Any, chosen: Any) -> None:
    if found._actual_context in (None, found._default_context):
        found._actual_context = chosen
    found._default_context = default


def _find_context() -> Any:
    """Return what multiprocessing keeps of the method: the default, and what was chosen."""
    return multiprocessing.context._default_context
