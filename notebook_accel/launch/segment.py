"""Memory that fresh workers map: the job's pickle and the tensors and arrays that it closes over.

It is written once per launch and mapped privately by each worker, so that what a worker changes is its own, as
after a fork. It has no name: nothing is left behind however the processes end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
from multiprocessing import reduction
from typing import Any

from ..events import Buffer
from .ship import Parcel, unpack

_ALIGN = 64


class Segment:
    """A parcel in shared memory; picklable while a process is being started."""

    def __init__(self, parcel: Parcel) -> None:
        views = [_raw(part) for part in (parcel.pickled, *parcel.buffers)]
        self._places: list[tuple[int, int]] = []
        position = 0
        for view in views:
            self._places.append((position, view.nbytes))
            position += -(-view.nbytes // _ALIGN) * _ALIGN
        self._fd = _anonymous_file(max(position, 1))
        with mmap.mmap(self._fd, max(position, 1)) as memory:
            for (start, length), view in zip(self._places, views, strict=True):
                memory[start : start + length] = view

    @property
    def nbytes(self) -> int:
        """Return the size of what is held, without padding."""
        return sum(length for _, length in self._places)

    def open(self) -> Any:
        """Return the object; its tensors and arrays use the segment's memory, copied where they are written."""
        size = os.fstat(self._fd).st_size
        if sys.platform == "win32":
            memory = mmap.mmap(self._fd, size, access=mmap.ACCESS_COPY)
        else:
            memory = mmap.mmap(self._fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.close()
        view = memoryview(memory)
        parts: list[Buffer] = [view[start : start + length] for start, length in self._places]
        return unpack(parts[0], parts[1:])

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (reduction.DupFd(self._fd), self._places)


def _receive(fd: Any, places: list[tuple[int, int]]) -> Segment:
    segment = Segment.__new__(Segment)
    segment._fd = fd.detach()
    segment._places = places
    return segment


def _raw(part: Buffer) -> memoryview:
    view = part.raw() if isinstance(part, pickle.PickleBuffer) else memoryview(part)
    return view if view.format == "B" else view.cast("B")


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("notebook_accel", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd
