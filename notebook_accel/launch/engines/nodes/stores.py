"""Torch's stores, where nodes and workers meet: one of this process, or the one of another machine."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore

from ....errors import LaunchError
from ... import descriptors
from ...checks.addresses import choose_listen_address, listen, listen_for_nodes
from ...job import Rendezvous
from .node_store import keep_quiet

PROBE_SECONDS: Final = 1.0
CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 20.0
_LOOK_SECONDS: Final = 0.01


def open_store(place: Rendezvous) -> TCPStore:
    """Open a store of this process.

    It listens at the run's own address alone. With several nodes it listens at all addresses if the others could not
    reach that one; see `choose_listen_address`. Left to itself, torch's store listens at all addresses, in IPv6. Then
    the name of each peer is looked up as IPv6 too, which no hosts file answers, and a slow name server delays
    everything.

    Args:
        place: address and port; port 0 is any free one.

    Raises:
        LaunchError: nothing can listen there.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    try:
        where = choose_listen_address(place.address) if place.num_nodes > 1 else place.address
        return _make_store(place.address, listen(where, int(place.port or 0)), **options)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"cannot open a store at {place.address}:{place.port}: {error}") from None


def _make_store(host: str, listening: socket.socket, **options: Any) -> TCPStore:
    """Return a store that takes over a socket; where it cannot be made, nothing listens any more."""
    port, taken = listening.getsockname()[1], os.fstat(listening.fileno())
    fd = listening.detach()
    try:
        store = TCPStore(host, port, master_listen_fd=fd, **options)
    except BaseException:
        with contextlib.suppress(OSError):  # torch has closed it
            if os.path.samestat(os.fstat(fd), taken):
                os.close(fd)
        raise
    descriptors.keep_store_from_forks(store, fd)
    return store


def open_for_nodes(host: str, port: int) -> TCPStore:
    """Open the store where a fixed number of nodes meet.

    Args:
        host: name or address by which the nodes know this one.
        port: its port.

    Raises:
        OSError, DistError: nothing can listen there.
    """
    options: dict[str, Any] = {
        "is_master": True,
        "timeout": timedelta(seconds=CONNECT_SECONDS),
        "wait_for_workers": False,
    }
    return _make_store(host, listen_for_nodes(host, port), **options)


def connect_store(host: str, port: int, check: Callable[[], None]) -> TCPStore:
    """Connect to the store that listens at an address.

    Args:
        host: the store's host.
        port: the store's port.
        check: called now and then; its exception ends the wait.

    Raises:
        OSError, DistError: nothing listens there.
        LaunchError: something else listens there; torch alone would wait for ever.
    """
    # first: torch's store complains in the terminal where nobody listens yet
    socket.create_connection((host, port), PROBE_SECONDS).close()
    results: list[TCPStore | BaseException] = []
    timeout = timedelta(seconds=CONNECT_SECONDS)

    def make() -> None:
        try:
            with keep_quiet():
                store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
            results.append(store)
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=make, name="notebook_accel store", daemon=True)
    thread.start()
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not results:
        check()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"what listens at {host}:{port} does not answer as the store of a run: "
                "another program may have the port, choose another use_port on all nodes"
            )
        thread.join(_LOOK_SECONDS)
    if isinstance(results[0], BaseException):
        raise results[0]
    results[0].set_timeout(timeout)
    return results[0]
