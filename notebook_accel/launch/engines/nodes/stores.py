"""Torch's stores, through which nodes and workers meet: opened here, or found on another machine."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore

from ....errors import LaunchError
from ...addresses import listen, open_to_others
from ...job import Rendezvous

PROBE_SECONDS: Final = 1.0
CONNECT_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 6.0
_LOOK_SECONDS: Final = 0.01


def opened(place: Rendezvous) -> TCPStore:
    """Open a store that listens at the run's own address alone, with several nodes wherever they come in by its name.

    Left to itself torch's listens at all addresses, in IPv6; the name of each peer is then looked up as IPv6 too,
    which no hosts file answers, and a name server that is slow or away delays everything.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    try:
        if sys.platform == "win32":
            return TCPStore(place.address, int(place.port or 0), use_libuv=False, **options)
        where = open_to_others(place.address) if place.num_nodes > 1 else place.address
        listening = listen(where, int(place.port or 0))
        port = listening.getsockname()[1]
        return TCPStore(place.address, port, master_listen_fd=listening.detach(), **options)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"cannot open a store at {place.address}:{place.port}: {error}") from None


def found(host: str, port: int, check: Callable[[], None]) -> TCPStore:
    """Return the store that listens at an address; OSError or DistError where nothing does.

    LaunchError where something else listens there, for which torch waits for ever; `check` is called meanwhile.
    """
    # torch's store complains in the terminal where nobody listens yet
    socket.create_connection((host, port), PROBE_SECONDS).close()
    made: list[TCPStore | BaseException] = []
    timeout = timedelta(seconds=CONNECT_SECONDS)

    def make() -> None:
        try:
            made.append(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=make, name="notebook_accel store", daemon=True)
    thread.start()
    deadline = time.monotonic() + _ANSWER_SECONDS
    while not made:
        check()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"what listens at {host}:{port} does not answer as the store of a run: "
                "another program may have the port, choose another use_port on all nodes"
            )
        thread.join(_LOOK_SECONDS)
    if isinstance(made[0], BaseException):
        raise made[0]
    made[0].set_timeout(timeout)
    return made[0]
