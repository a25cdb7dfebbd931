"""Memory that fresh workers map: the job's pickle and the tensors and arrays that it closes over.

It is written once per launch and mapped privately by each worker, so that what a worker changes is its own, as
after a fork. It has no name: nothing is left behind however the processes end.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError

if TYPE_CHECKING:  # an agent's way to the notebook needs no events
    from ...events import Buffer
    from .pickled import Pickled

_ALIGN = 64
_CHUNK = 1 << 26
_STRIPE_ALIGN = 1 << 21
_LARGE = 1 << 27
"""From how many bytes on several threads write: each to a file of its own, for the system locks a whole file."""
_MOST_FILES = 4
_HINTS = {
    errno.EFBIG: "; raise the limit on the size of files (ulimit -f)",
    errno.ENOMEM: "; raise the limit on memory (ulimit -v)",
}


class SharedPickle:
    """A pickled value in shared memory, which other processes reach by its descriptors.

    Args:
        pickled: what is written to the memory; its descriptors belong to this object then.

    Raises:
        LaunchError: the system does not give that much.

    Attributes:
        shared: descriptors of memory that the value shares with other processes.
    """

    def __init__(self, pickled: Pickled) -> None:
        self.shared = pickled.shared
        views = [pickle.PickleBuffer(part).raw() for part in (pickled.data, *pickled.buffers)]
        self._spans: list[tuple[int, int]] = []
        position = 0
        for view in views:
            self._spans.append((position, view.nbytes))
            position += -(-view.nbytes // _ALIGN) * _ALIGN
        size = max(position, 1)
        self._memory = _Files([], size, size)
        try:
            self._memory = _Files.create(size, _choose_number(size))
            self._memory.write(self._spans, views)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            hint = _HINTS.get(error.errno or 0, "")
            raise LaunchError(
                f"the function, its arguments and the globals that it uses are {size:,} bytes, for which the system "
                f"gives no shared memory: {error}{hint}"
            ) from error

    @classmethod
    def from_filenos(cls, layout: Any, fds: Sequence[int]) -> SharedPickle:
        """Return what another process holds in shared memory.

        Args:
            layout: the other process's.
            fds: duplicates of its `filenos`; the result owns them.
        """
        spans, size, stripe = layout
        segment = cls.__new__(cls)
        segment._spans = list(spans)
        number = -(-size // stripe)
        segment._memory = _Files(list(fds[:number]), size, stripe)
        segment.shared = list(fds[number:])
        return segment

    @property
    def layout(self) -> tuple[Sequence[tuple[int, int]], int, int]:
        """Return the parts, the bytes in all files of the memory, and the bytes in each but the last one."""
        return self._spans, self._memory.size, self._memory.stripe

    def filenos(self) -> list[int]:
        """Return all descriptors: of the files of the memory, then of what is shared."""
        return [*self._memory.fds, *self.shared]

    def open(self) -> Any:
        """Return the value; its tensors and arrays use this memory, each page of which is copied once it is written."""
        from .pickling import unpack  # here: it imports torch, which who only passes memory on does without

        view = memoryview(self._memory.map_privately())
        shared, self.shared = self.shared, []
        self.close()
        parts: list[Buffer] = [view[start : start + length] for start, length in self._spans]
        return unpack(parts[0], parts[1:], shared)

    def close(self) -> None:
        """Give this process's hold on the memory back."""
        self._memory.close()
        while self.shared:
            os.close(self.shared.pop())


class _Files:
    """Memory that is one file without a name, or several that follow each other.

    Args:
        fds: the files' descriptors; this object owns them.
        size: bytes in all files together.
        stripe: bytes in each file but the last one.
    """

    def __init__(self, fds: list[int], size: int, stripe: int) -> None:
        self.fds = fds
        self.size = size
        self.stripe = stripe

    @classmethod
    def create(cls, size: int, number: int) -> _Files:
        """Return new memory of a size in bytes, in as many files."""
        stripe = size if number == 1 else -(-size // (number * _STRIPE_ALIGN)) * _STRIPE_ALIGN
        files = cls([], size, stripe)
        try:
            for start in range(0, size, stripe):
                files.fds.append(_open_unnamed(min(stripe, size - start)))
        except BaseException:
            files.close()
            raise
        return files

    def write(self, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        """Write without a mapping, whose pages the system would fill with zeros first."""

        def write_file(number: int) -> None:
            first = number * self.stripe
            for (start, length), view in zip(spans, views, strict=True):
                low, high = max(first, start), min(first + self.stripe, start + length)
                if low < high:
                    _write(self.fds[number], view[low - start : high - start], low - first)

        _run_in_threads(write_file, range(len(self.fds)))

    def map_privately(self) -> mmap.mmap:
        if len(self.fds) == 1:
            return mmap.mmap(self.fds[0], self.size, access=mmap.ACCESS_COPY)
        memory = _map_nothing(self.size)
        for number, fd in enumerate(self.fds):
            first = number * self.stripe
            _map_over(memory, first, min(self.stripe, self.size - first), fd)
        return memory

    def close(self) -> None:
        fds, self.fds = self.fds, []
        _run_in_threads(os.close, fds)  # the last one that closes a file waits until its memory is given back


def _choose_number(size: int) -> int:
    """Return in how many files so many bytes are written fastest."""
    if size < _LARGE or sys.platform != "linux":
        return 1
    return min(_MOST_FILES, len(os.sched_getaffinity(0)))


def _run_in_threads(function: Callable[[int], object], values: Sequence[int]) -> None:
    """Call a function with each value, at the same time where there are several."""
    if len(values) < 2:
        list(map(function, values))
        return
    with ThreadPoolExecutor(len(values)) as pool:
        list(pool.map(function, values))


def _map_nothing(size: int) -> mmap.mmap:
    """Return private memory for others to be mapped over; it is given back as one when nothing uses it any more."""
    if sys.platform != "linux":
        raise NotImplementedError("memory lies in one file there")
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_over(memory: mmap.mmap, start: int, length: int, fd: int) -> None:
    """Map a file privately over a part of memory; see mmap(2), MAP_FIXED."""
    if sys.platform != "linux":
        raise NotImplementedError("memory lies in one file there")
    map_fixed = 0x10  # of Linux; Python's module does not name it
    library = ctypes.CDLL(None, use_errno=True)
    call = library.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
    flags = mmap.MAP_PRIVATE | map_fixed
    if call(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_unnamed(data: bytes) -> int:
    """Return a descriptor of memory, or of a file without a name, that holds some bytes.

    Args:
        data: the bytes. Reading begins with the first.
    """
    fd = _open_unnamed(0)
    try:
        _write(fd, memoryview(data), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write(fd: int, view: memoryview, position: int) -> None:
    """Write bytes to a file from a position on; the system takes 2 GiB at once at most."""
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
