"""Gives Ray more time to start: by itself it gives a node up after half a minute, also on a busy machine."""

from __future__ import annotations

import os
import time
from typing import Any

SECONDS = 200


def be_patient() -> None:
    """Let this process, and the nodes that it starts, wait longer for Ray."""
    from ray._private import services

    # a node ends where its own helper takes longer than this to start
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(1000 * SECONDS))
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
