"""Gives Ray more time to start: a slow node ends after half a minute, and is given up, also on a busy machine."""

from __future__ import annotations

import os
import time
from typing import Any

SECONDS = 150


def be_patient() -> None:
    """Let this process wait longer for the nodes that it starts."""
    from ray._private import services

    os.environ.setdefault(
        "RAY_agent_register_timeout_ms", str(SECONDS * 1000)
    )  # else the node ends by itself
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
