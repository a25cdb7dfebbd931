"""What this project changes in Python's multiprocessing: the only module that uses its private names.

A worker is given them so that processes of its own (data loader workers, process pools) start as the notebook's would,
are heard of, and have their sockets where they are removed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import process, resource_tracker, util
from typing import Any, Final

_PLATFORMS: Final = multiprocessing.get_all_start_methods()[0]
"""The platform's default; asked later, it may be what a worker was given."""
_CHANGING: Final = threading.Lock()
_BLOCKS: Final = "blocks_of_notebook_accel"
"""What multiprocessing's context has of us: blocks in which the default is another one, each with what was before."""

# another thread may hold the lock at a fork
os.register_at_fork(after_in_child=_CHANGING._at_fork_reinit)  # type: ignore[attr-defined]


def list_flags() -> list[str]:
    """Return the flags of this Python, for one that is started."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def use_tracker(fd: int) -> None:
    """Share a resource tracker: with one of its own a process would remove, at its end, memory that is another's.

    Args:
        fd: `resource_tracker.getfd` of the process whose tracker it is.
    """
    resource_tracker._resource_tracker._fd = fd  # type: ignore[attr-defined]


def get_sockets_folder() -> str:
    """Return the folder where this process, and those that it starts, have sockets; empty before it was chosen."""
    return vars(process.current_process())["_config"].get("tempdir") or ""


def use_sockets_folder(path: str) -> None:
    """Let this process, and those that it starts, have their sockets in a folder."""
    vars(process.current_process())["_config"]["tempdir"] = path


def forget(child: process.BaseProcess) -> None:
    """Let nobody wait for a child any more, at exit or before."""
    process._children.discard(child)  # type: ignore[attr-defined]


def wait_at_exit() -> None:
    """Do what multiprocessing does when a process ends, as a fork without exit handlers has to: wait for children."""
    util._exit_function()  # type: ignore[attr-defined]


def choose_start_method() -> str | None:
    """Return how workers start processes of their own: as the user chose here, else by a fork on Linux.

    A process that is no fork cannot be given what is defined in a cell: it has no importable module. Since Python 3.14
    forks are no longer the default of Linux. Who chooses the default by hand cannot be told from who only asked for it,
    as data loaders do; both have forks.

    Returns:
        A start method of `multiprocessing`; None leaves the worker's default.
    """
    method = _get_chosen() or _find_context()._default_context.get_start_method()
    if method != _PLATFORMS:
        return str(method)
    return "fork" if sys.platform == "linux" else None


def set_default(method: str) -> None:
    """Let this process start others by a method that counts as the default: a function can choose another one.

    `multiprocessing.set_start_method` would choose it, and can be called once only.

    Args:
        method: a start method of `multiprocessing`.
    """
    _find_context()._default_context = multiprocessing.get_context(method)
    _choose(None)


@contextlib.contextmanager
def start_as_in_workers() -> Iterator[None]:
    """Let this process start others in the block as a worker would, unless the block chooses another method.

    Blocks of several threads may overlap; all is as before when the last one ends.
    """
    found, block = _find_context(), object()
    blocks: list[tuple[object, Any, str | None]] = vars(found).setdefault(_BLOCKS, [])
    with _CHANGING:
        default, chosen = found._default_context, _get_chosen()
        method = choose_start_method()
        if blocks:
            blocks.append((block, *blocks[0][1:]))
        elif method not in (None, chosen or default.get_start_method()):
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


def _restore(found: Any, default: Any, chosen: str | None) -> None:
    if _get_chosen() in (None, found._default_context.get_start_method()):
        _choose(chosen)
    found._default_context = default


def _get_chosen() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def _choose(method: str | None) -> None:
    multiprocessing.set_start_method(method, force=True)


def _find_context() -> Any:
    """Return what multiprocessing keeps of the method: the default, and what was chosen."""
    return multiprocessing.context._default_context
