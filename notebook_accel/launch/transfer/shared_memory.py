"""Memory that fresh workers map: the job's pickle and the tensors and arrays that it closes over.

It is written once per launch and mapped privately by each worker, so that what a worker changes is its own, as
after a fork. It has no name: nothing is left behind however the processes end.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

from ...errors import LaunchError
from ...events import Buffer, as_bytes
from .pickled import Pickled

_ALIGN = 64
_CHUNK = 1 << 26
_HINTS = {
    errno.EFBIG: "; raise the limit on the size of files (ulimit -f)",
    errno.ENOMEM: "; raise the limit on memory (ulimit -v)",
}


class SharedPickle:
    """A pickled value in shared memory; may itself be pickled while a process is being started.

    Args:
        pickled: what is written to the memory.

    Raises:
        LaunchError: the system does not give that much.
    """

    def __init__(self, pickled: Pickled) -> None:
        views = [as_bytes(part) for part in (pickled.data, *pickled.buffers)]
        self._spans: list[tuple[int, int]] = []
        position = 0
        for view in views:
            self._spans.append((position, view.nbytes))
            position += -(-view.nbytes // _ALIGN) * _ALIGN
        size = max(position, 1)
        memory: _NamedMemory | _File | None = None
        try:
            memory = self._memory = _NamedMemory(size) if sys.platform == "win32" else _File(size)
            memory.write(self._spans, views)
        except BaseException as error:
            if memory is not None:
                memory.close()
            if not isinstance(error, OSError):
                raise
            hint = _HINTS.get(error.errno or 0, "")
            raise LaunchError(
                f"the function, its arguments and the globals that it uses are {size:,} bytes, for which the system "
                f"gives no shared memory: {error}{hint}"
            ) from error

    @classmethod
    def from_descriptor(cls, fd: int, spans: Sequence[tuple[int, int]]) -> SharedPickle:
        """Return what another process holds in shared memory.

        Args:
            fd: descriptor of the memory; the result owns it.
            spans: the other process's `spans`.
        """
        segment = cls.__new__(cls)
        segment._spans = list(spans)
        segment._memory = _make_file(fd, os.fstat(fd).st_size)
        return segment

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Return offset and length of each part, in bytes."""
        return self._spans

    def fileno(self) -> int:
        """Return the memory's descriptor; Windows has none."""
        assert isinstance(self._memory, _File)
        return self._memory.fileno()

    def open(self) -> Any:
        """Return the value; its tensors and arrays use this memory, each page of which is copied once it is written."""
        from .pickling import unpack  # here: it imports torch, which who only passes memory on does without

        view = memoryview(self._memory.map_privately())
        self.close()
        parts: list[Buffer] = [view[start : start + length] for start, length in self._spans]
        return unpack(parts[0], parts[1:])

    def close(self) -> None:
        """Give this process's hold on the memory back."""
        self._memory.close()


class _File:
    """Memory that is a file without a name."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._fd = _open_unnamed(size)

    def write(self, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        """Write without a mapping, whose pages the system would fill with zeros first."""
        for (start, _), view in zip(spans, views, strict=True):
            _write(self._fd, view, start)

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
        return _unpickle_file, (reduction.DupFd(self._fd), self._size)


def _unpickle_file(fd: Any, size: int) -> _File:
    return _make_file(fd.detach(), size)


def _make_file(fd: int, size: int) -> _File:
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

    def write(self, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        assert self._memory is not None
        for (start, length), view in zip(spans, views, strict=True):
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


def write_unnamed(data: bytes) -> int:
    """Return a descriptor of memory, or of a file without a name, that holds some bytes; not for Windows.

    Args:
        data: the bytes. Reading begins with the first.
    """
    if sys.platform == "win32":
        raise NotImplementedError("Windows passes no descriptors")
    fd = _open_unnamed(0)
    try:
        _write(fd, memoryview(data), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, view: memoryview, position: int) -> None:
    """Write bytes to a file from a position on; the system takes 2 GiB at once at most."""
    if sys.platform == "win32":
        raise NotImplementedError("Windows has memory with names")
    written = 0
    while written < view.nbytes:
        written += os.pwrite(fd, view[written : written + _CHUNK], position + written)


def _create_memory() -> int:
    """Return a descriptor of memory; -1 where Python or the system has none, or a sandbox forbids it."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return -1
    try:
        return os.memfd_create("notebook_accel", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
        return -1


def _open_unnamed(size: int) -> int:
    fd = _create_memory()
    if fd < 0:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
