"""Torch's store, where workers meet."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore

from ...errors import LaunchError
from .. import descriptors
from ..checks.addresses import listen, listen_for_nodes
from ..job import Rendezvous

_OPEN_TIMEOUT: Final = timedelta(seconds=5)  # an address that leads here may lead to one port alone


def open_store(place: Rendezvous) -> TCPStore:
    """Open a store of this process.

    It listens at the run's own address alone where that can be; see `listen_for_nodes`. Left to itself, torch's store
    listens at all addresses, in IPv6. Then the name of each peer is looked up as IPv6 too, which no hosts file answers,
    and a slow name server delays everything.

    Args:
        place: address and port; port 0 is any free one.

    Raises:
        LaunchError: nothing can listen there.
    """
    several = place.num_nodes > 1
    opens, options = (listen_for_nodes, {"timeout": _OPEN_TIMEOUT}) if several else (listen, {})
    try:
        return _make_store(place.address, opens(place.address, int(place.port or 0)), options)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"cannot open a store at {place.address}:{place.port}: {error}") from None


def _make_store(host: str, listening: socket.socket, options: dict[str, Any]) -> TCPStore:
    """Return a store that takes over a socket; where it cannot be made, nothing listens any more."""
    port, taken = listening.getsockname()[1], os.fstat(listening.fileno())
    fd = listening.detach()
    try:
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, **options)
    except BaseException:
        with contextlib.suppress(OSError):  # torch has closed it
            if os.path.samestat(os.fstat(fd), taken):
                os.close(fd)
        raise
    descriptors.keep_store_from_forks(store, fd)
    return store
