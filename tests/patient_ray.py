"""Gives Ray more time to start: it gives up after half a minute on a node that is slow, also on a busy machine."""

from __future__ import annotations

import time
from typing import Any

SECONDS = 60  # after that the node has ended: it does so where a helper of its own is too slow


def be_patient() -> None:
    """Let this process wait longer for the nodes that it starts."""
    from ray._private import services

    find = services.get_node

    def find_node(*args: Any) -> Any:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                return find(*args)
            except RuntimeError:  # it is not up yet
                time.sleep(0.5)
        return find(*args)

    services.get_node = find_node
