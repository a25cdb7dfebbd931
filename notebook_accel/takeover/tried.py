"""The libraries that run on the take-over, and the newest version of each that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TRIED: Final[Mapping[str, str]] = {
    "transformers": "5.23",
    "trl": "1.16",
    "peft": "0.21",
    "diffusers": "0.42",
    "sentence-transformers": "6.2",
    "datasets": "5.2",
}


def is_newer(name: str, version: str) -> bool:
    """Return True for a minor version that is later than the newest that was tried.

    Args:
        name: a key of `TRIED`.
        version: what is installed.
    """
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release[:2] > Version(TRIED[name]).release
    except InvalidVersion:
        return False
