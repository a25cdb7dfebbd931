"""Descriptors of this process's runs and sessions, which no process that is forked from it keeps.

A copy that lives on would keep a port taken, a worker waiting for the end of a pipe, or alive without its notebook.
"""

from __future__ import annotations

import functools
import os
import socket
import stat
import sys
from collections.abc import Iterable
from typing import Any

from .. import runtime

_LISTS = ("/proc/self/fd", "/dev/fd")
_KERNEL_SOCKETS = ("shell", "iopub", "stdin", "control", "hb")


def keep_from_forks(owner: Any) -> None:
    """Take an owner's descriptors away from all processes that are forked from now on, while the owner lives.

    In the fork the descriptors lead nowhere instead of being closed: whatever there takes itself for their owner may
    close them, and must not close what got the same number.

    Args:
        owner: has a method `filenos`, which returns the descriptors.
    """
    _watch_forks()
    runtime.owners().add(owner)


def forget(owner: Any) -> None:
    """Leave an owner out of later forks: it has closed its descriptors."""
    runtime.owners().discard(owner)


def keep_store_from_forks(store: Any, fd: int) -> None:
    """Take the port of a store away from all processes that are forked from now on, while the store lives.

    Args:
        store: torch's TCPStore.
        fd: the descriptor by which it listens.
    """
    _watch_forks()
    runtime.stores()[store] = fd


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_take_away)


def _take_away() -> None:
    """In the fork: lead the descriptors to nowhere; what belongs to this process itself begins anew."""
    owners, stores = runtime.owners(), runtime.stores()
    _lead_nowhere({fd for owner in list(owners) for fd in _ask(owner)} | set(stores.values()))
    owners.clear()
    stores.clear()


def leave_kernel_ports() -> None:
    """Close the kernel's ports in its worker: a kernel that is restarted needs them, maybe before the worker ends."""
    kernel_app = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    if kernel_app is None or not kernel_app.initialized():
        return
    app = kernel_app.instance()
    ports = {getattr(app, f"{name}_port", 0) for name in _KERNEL_SOCKETS}
    _lead_nowhere({fd for fd in _list_sockets() if _find_port(fd) in ports})


def _lead_nowhere(found: set[int]) -> None:
    if found:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in found:
            os.dup2(nowhere, fd, inheritable=False)
        os.close(nowhere)


def _ask(owner: Any) -> list[int]:
    try:
        return [fd for fd in owner.filenos() if fd >= 0]
    except (OSError, ValueError):  # another thread was closing what it has
        return []


def _list_sockets() -> Iterable[int]:
    for name in os.listdir(next(filter(os.path.isdir, _LISTS))):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # the descriptor of the list itself
            continue
        if is_socket:
            yield int(name)


def _find_port(fd: int) -> int | None:
    """Return the port at which a socket listens; None where it does not."""
    connection = socket.socket(fileno=fd)
    try:
        is_of_network = connection.family in (socket.AF_INET, socket.AF_INET6)
        if is_of_network and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(connection.getsockname()[1])
        return None
    finally:
        connection.detach()
