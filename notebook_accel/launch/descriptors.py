"""Descriptors of this process's runs and sessions, which no process that is forked from it keeps.

A copy that lives on would keep a port taken, a worker waiting for the end of a pipe, or alive without its notebook.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .. import runtime

_LISTS = ("/proc/self/fd", "/dev/fd")
_MOST_DESCRIPTORS = 1 << 16
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


def keep_store_from_forks(store: Any) -> None:
    """Take a store's descriptors away from all processes that are forked from now on, while the store lives.

    Args:
        store: torch's TCPStore.
    """
    _watch_forks()
    runtime.stores().add(store)


class _ServerLine:
    """What keeps multiprocessing's fork server running: our end of a pipe. The server ends when nobody has it."""

    def filenos(self) -> list[int]:
        server = _find_server()
        return [] if server is None or server._forkserver_alive_fd is None else [server._forkserver_alive_fd]


_SERVER_LINE = _ServerLine()


def keep_server_from_forks() -> None:
    """Let multiprocessing's fork server end with this process, although forks of it may live on."""
    keep_from_forks(_SERVER_LINE)


def leave_server() -> None:
    """Give up the fork server of the notebook in its worker: it is to end with the notebook.

    The worker can have a server of its own instead. It could not use the notebook's, which is no child of it.
    """
    server = _find_server()
    if server is None:
        return
    if server._forkserver_alive_fd is not None:
        _close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _find_server() -> Any:
    return getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_take_away)


def _take_away() -> None:
    """In the fork: lead the descriptors to nowhere; what belongs to this process itself begins anew."""
    owners, stores = runtime.owners(), runtime.stores()
    _lead_nowhere({fd for owner in list(owners) for fd in _ask(owner)})
    _lead_nowhere(_find_connections({store.port for store in list(stores)}))
    owners.clear()
    stores.clear()


def leave_kernel_ports() -> None:
    """Close the kernel's ports in its worker: a kernel that is restarted needs them, maybe before the worker ends."""
    kernel_app = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    if kernel_app is None or not kernel_app.initialized():
        return
    app = kernel_app.instance()
    ports = {getattr(app, f"{name}_port", 0) for name in _KERNEL_SOCKETS} - {0}
    _lead_nowhere({fd for fd in _find_connections(ports) if _is_listening(fd)})


def _lead_nowhere(found: set[int]) -> None:
    if not found:
        return
    nowhere = _open_nowhere()
    if nowhere is None:  # no descriptor is free: one of these makes room
        _close(min(found))
        nowhere = _open_nowhere()
    for fd in found - {nowhere}:
        try:
            os.dup2(-1 if nowhere is None else nowhere, fd, inheritable=False)
        except OSError:  # it is above a limit that was lowered meanwhile: no file can take its place
            _close(fd)
    if nowhere is not None and nowhere not in found:
        os.close(nowhere)


def _open_nowhere() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDWR)
    except OSError:
        return None


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # another thread was closing it
        os.close(fd)


def _ask(owner: Any) -> list[int]:
    try:
        return list(owner.filenos())
    except (OSError, ValueError):  # another thread was closing what it has
        return []


def _find_connections(ports: set[int]) -> set[int]:
    """Return the descriptors of all TCP sockets that have one of some ports at either end."""
    if not ports:
        return set()
    return {fd for fd in _list_sockets() if ports & set(_read_ports(fd))}


def _list_sockets() -> Iterator[int]:
    for fd in _list_descriptors():
        with contextlib.suppress(OSError):  # the descriptor of the list itself
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd


def _is_listening(fd: int) -> bool:
    with contextlib.suppress(OSError):  # not every system says so
        connection = socket.socket(fileno=fd)
        try:
            return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        finally:
            connection.detach()
    return False


def _list_descriptors() -> Iterable[int]:
    folder = next(filter(os.path.isdir, _LISTS), None)
    if folder is None:
        return ()
    try:
        return [int(name) for name in os.listdir(folder)]
    except OSError:  # no descriptor is free to read the list with
        return range(_MOST_DESCRIPTORS)


def _read_ports(fd: int) -> list[int]:
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=fd)
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return [connection.getsockname()[1], *_read_peer_port(connection)]
        finally:
            connection.detach()
    return []


def _read_peer_port(connection: socket.socket) -> list[int]:
    with contextlib.suppress(OSError):  # it listens
        return [int(connection.getpeername()[1])]
    return []
