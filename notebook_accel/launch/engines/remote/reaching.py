"""Whether hosts reach each other: ranks connect directly, and a firewall between them would let them wait for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from .messages import Place

PATIENCE_SECONDS: Final = 10.0
"""In which a host answers that is there; the system asks four times."""


class Reach:
    """Connects to places in a thread of its own, one after the other, up to the first that cannot be reached.

    Args:
        places: what has to be reached.
        tell: called in the thread when the answer is there.

    Attributes:
        problem: why one cannot be reached, empty where all can; None before that is known.
    """

    def __init__(self, places: Sequence[Place], tell: Callable[[], None]) -> None:
        self.problem: str | None = None
        self._places, self._tell = places, tell
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        problem = ""
        for place in self._places:
            if problem := try_to_reach(place):
                break
        self.problem = problem
        with contextlib.suppress(OSError):  # the agent has just ended
            self._tell()


def try_to_reach(place: Place) -> str:
    """Return why a place cannot be reached, empty where it can.

    Args:
        place: somebody listens there.
    """
    try:
        socket.create_connection((place.address, place.port), PATIENCE_SECONDS).close()
    except OSError as error:
        is_silent = isinstance(error, TimeoutError)
        why = f"no answer in {PATIENCE_SECONDS:g} s" if is_silent else error.strerror or str(error)
        return (
            f"it cannot connect to {place.host} at {place.address}:{place.port} ({why}); ranks talk to each other "
            "directly, so a firewall on or between the hosts has to let them"
        )
    return ""


def drop_connections(listening: socket.socket) -> None:
    """Close the connections that others have made to see whether they can.

    Args:
        listening: the socket.
    """
    listening.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            listening.accept()[0].close()
    listening.setblocking(True)
