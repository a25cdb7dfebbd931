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
import uuid
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

from ..events import Buffer
from .parcel import Parcel

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
        self._memory = _NamedMemory(max(position, 1)) if sys.platform == "win32" else _File(max(position, 1))
        self._memory.write(self._places, views)

    @classmethod
    def received(cls, fd: int, places: Sequence[tuple[int, int]]) -> Segment:
        """Return the segment of another process, whose descriptor this one was given."""
        segment = cls.__new__(cls)
        segment._places = list(places)
        segment._memory = _file(fd, os.fstat(fd).st_size)
        return segment

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """Return where each part begins, and how long it is."""
        return self._places

    def fileno(self) -> int:
        """Return the descriptor of the memory; there is none on Windows."""
        assert isinstance(self._memory, _File)
        return self._memory.fileno()

    @property
    def nbytes(self) -> int:
        """Return the size of what is held, without padding."""
        return sum(length for _, length in self._places)

    def open(self) -> Any:
        """Return the object; its tensors and arrays use the segment's memory, copied where they are written."""
        from .ship import unpack  # with torch, which a process that only passes a parcel on does without

        view = memoryview(self._memory.map_privately())
        self.close()
        parts: list[Buffer] = [view[start : start + length] for start, length in self._places]
        return unpack(parts[0], parts[1:])

    def close(self) -> None:
        """Give this process's hold on the memory back."""
        self._memory.close()


class _File:
    """Memory that is a file without a name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._fd = _anonymous_file(size)

    def write(self, places: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        with mmap.mmap(self._fd, self._size) as memory:
            for (start, length), view in zip(places, views, strict=True):
                memory[start : start + length] = view

    def map_privately(self) -> mmap.mmap:
        return mmap.mmap(self._fd, self._size, access=mmap.ACCESS_COPY)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        if sys.platform == "win32":
            raise NotImplementedError("Windows passes no descriptors")
        return _received_file, (reduction.DupFd(self._fd), self._size)


def _received_file(fd: Any, size: int) -> _File:
    return _file(fd.detach(), size)


def _file(fd: int, size: int) -> _File:
    file = _File.__new__(_File)
    file._fd = fd
    file._size = size
    return file


class _NamedMemory:
    """Memory of Windows, which is gone when the last process that has it open closes it or ends."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._name = f"notebook_accel-{uuid.uuid4()}"
        self._memory: mmap.mmap | None = self._map(mmap.ACCESS_WRITE)

    def write(self, places: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        assert self._memory is not None
        for (start, length), view in zip(places, views, strict=True):
            self._memory[start : start + length] = view

    def map_privately(self) -> mmap.mmap:
        return self._map(mmap.ACCESS_COPY)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_size": self._size, "_name": self._name, "_memory": None}

    def _map(self, access: int) -> mmap.mmap:
        options: dict[str, Any] = {"tagname": self._name}  # for Windows only, as are the types of mmap
        return mmap.mmap(-1, self._size, access=access, **options)


def _raw(part: Buffer) -> memoryview:
    view = part.raw() if isinstance(part, pickle.PickleBuffer) else memoryview(part)
    return view if view.format == "B" else view.cast("B")


def _anonymous_file(size: int) -> int:
    if sys.platform == "linux":
        fd = os.memfd_create("notebook_accel", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd
