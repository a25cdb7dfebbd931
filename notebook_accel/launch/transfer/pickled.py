"""A pickled value on its way to a worker or back; this module imports no torch, for those who only pass it on."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...events import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Pickled:
    """A pickled value, by pickle's protocol 5.

    Attributes:
        data: the pickle itself.
        buffers: memory of tensors and arrays, outside the pickle; in the order in which `pickle.loads` wants it.
        shared: descriptors of memory that processes share, see `sharing`; they belong to who holds this object.
    """

    data: bytes
    buffers: list[Buffer]
    shared: list[int] = field(default_factory=list)
