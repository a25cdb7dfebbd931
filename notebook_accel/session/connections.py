"""In a worker: ends the wait of a thread for other ranks, which no signal ends.

An abort of gloo's process groups (torch 2.13) does nothing to a collective that waits. What does is the end of its
connections: they are shut, and the collective raises at once, here and on the rank at the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import psutil

from ..comm import torch_dist


def close_to(pids: Sequence[int]) -> None:
    """Shut this process's TCP connections to others, given by their ids, and abort the groups of other backends."""
    torch_dist.abort_groups()
    own = _connections(psutil.Process().pid)
    theirs = {_ports(found) for pid in pids for found in _connections(pid)}
    for found in own:
        here, there = _ports(found)
        if found.fd >= 0 and (there, here) in theirs:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _connections(pid: int) -> list[Any]:
    try:
        process = psutil.Process(pid)
        found = process.net_connections if hasattr(process, "net_connections") else process.connections
        return [connection for connection in found("tcp") if connection.raddr]
    except (psutil.Error, OSError):
        return []  # it has ended, and so have they


def _ports(connection: Any) -> tuple[int, int]:
    return connection.laddr.port, connection.raddr.port
