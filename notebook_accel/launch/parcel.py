"""A pickle on its way to a worker or back; what only passes it on needs no torch for it."""

from __future__ import annotations

from dataclasses import dataclass

from ..events import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A pickle and its out-of-band buffers."""

    pickled: bytes
    buffers: list[Buffer]
