"""In a worker: ends the wait of a thread for other ranks, which no signal ends.

Aborting gloo's process groups (torch 2.13) does not end a collective that waits. Shutting its connections does: the
collective raises at once, here and on the rank at the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import psutil

from .. import runtime
from ..comm import torch_dist
from ..environ import get


def close_connections_to(pids: Sequence[int], addresses: Sequence[str] = ()) -> None:
    """Shut this process's connections to others, and abort its groups of other backends than gloo.

    Args:
        pids: process ids of the others.
        addresses: of their machines, where they are on several: then all connections to these are shut, but those to
            the store where the ranks meet.
    """
    torch_dist.abort_groups()
    current = runtime.current()
    if current is not None and isinstance(current.comm, torch_dist.TorchComm):
        current.comm.shut_down_sockets()
    own = _connections(psutil.Process().pid)
    theirs = {_ports(found) for pid in pids for found in _connections(pid)}
    store = get("MASTER_PORT")
    for found in own:
        here, there = _ports(found)
        is_to_rank = len(addresses) > 1 and found.raddr.ip.removeprefix("::ffff:") in addresses
        is_to_rank = is_to_rank and store not in (str(here), str(there))
        if found.fd >= 0 and (is_to_rank or (there, here) in theirs):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[Any]:
    try:
        process = psutil.Process(pid)
        found = process.net_connections if hasattr(process, "net_connections") else process.connections
        return [connection for connection in found("tcp") if connection.raddr]
    except (psutil.Error, OSError):
        return []  # the process has ended, with its connections


def _ports(connection: Any) -> tuple[int, int]:
    return connection.laddr.port, connection.raddr.port
