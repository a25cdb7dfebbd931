"""Processes that remove what others have forgotten in shared memory; they have to end last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_START: Final = ".resource_tracker import main"
"""In the command lines of those of multiprocessing, and of loky, which joblib and scikit-learn start."""


def is_tracker(command: Sequence[str]) -> bool:
    """Return whether a process ignores SIGTERM, and ends by itself once all have ended whose memory it removes.

    Args:
        command: the words of its command line.
    """
    return any(_START in word for word in command)
