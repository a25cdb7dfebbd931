"""How a function that is launched starts processes of its own: data loader workers, process pools."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import sys
from collections.abc import Iterator
from typing import Any


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
    if method != multiprocessing.get_all_start_methods()[0]:
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
    """Let this process start others in the block as a worker would, unless the block chooses another method."""
    found, method = _find_context(), choose_start_method()
    default, chosen = found._default_context, found._actual_context
    if method in (None, (chosen or default).get_start_method()):
        yield
        return
    set_default(method)
    try:
        yield
    finally:
        if found._actual_context in (None, found._default_context):
            found._actual_context = chosen
        found._default_context = default


def _find_context() -> Any:
    """Return what multiprocessing keeps of the method: the default, and what was chosen."""
    return multiprocessing.context._default_context
