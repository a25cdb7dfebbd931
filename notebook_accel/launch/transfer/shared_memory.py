"""Memory that fresh workers map: the job's pickle and the tensors and arrays that it closes over.

It is written once per launch and mapped privately by each worker, so that what a worker changes is its own, as
after a fork. It has no name: nothing is left behind however the processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

from ...errors import LaunchError
from ...events import Buffer, as_bytes
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
    """A pickled value in shared memory; may itself be pickled while a process is being started.

    Args:
        pickled: what is written to the memory.
        in_one_file: whether it has to be reached by one descriptor, also where that is slower.

    Raises:
        LaunchError: the system does not give that much.
    """

    def __init__(self, pickled: Pickled, *, in_one_file: bool = False) -> None:
        views = [as_bytes(part) for part in (pickled.data, *pickled.buffers)]
        self._spans: list[tuple[int, int]] = []
        position = 0
        for view in views:
            self._spans.append((position, view.nbytes))
            position += -(-view.nbytes // _ALIGN) * _ALIGN
        size = max(position, 1)
        memory: _NamedMemory | _Files | None = None
        try:
            memory = self._memory = _create(size, 1 if in_one_file else _choose_number(size))
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
        size = os.fstat(fd).st_size
        segment._memory = _Files([fd], size, size)
        return segment

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Return offset and length of each part, in bytes."""
        return self._spans

    def fileno(self) -> int:
        """Return the descriptor of memory in one file; Windows has none."""
        assert isinstance(self._memory, _Files)
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


class _Files:
    """Memory that is one file without a name, or several that follow each other.

    Args:
        fds: the files' descriptors; this object owns them.
        size: bytes in all files together.
        stripe: bytes in each file but the last one.
    """

    def __init__(self, fds: list[int], size: int, stripe: int) -> None:
        self._fds = fds
        self._size = size
        self._stripe = stripe

    @classmethod
    def create(cls, size: int, number: int) -> _Files:
        """Return new memory of a size in bytes, in as many files."""
        stripe = size if number == 1 else -(-size // (number * _STRIPE_ALIGN)) * _STRIPE_ALIGN
        files = cls([], size, stripe)
        try:
            for start in range(0, size, stripe):
                files._fds.append(_open_unnamed(min(stripe, size - start)))
        except BaseException:
            files.close()
            raise
        return files

    def write(self, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        """Write without a mapping, whose pages the system would fill with zeros first."""

        def write_file(number: int) -> None:
            first = number * self._stripe
            for (start, length), view in zip(spans, views, strict=True):
                low, high = max(first, start), min(first + self._stripe, start + length)
                if low < high:
                    _write(self._fds[number], view[low - start : high - start], low - first)

        _run_in_threads(write_file, range(len(self._fds)))

    def map_privately(self) -> mmap.mmap:
        if len(self._fds) == 1:
            return mmap.mmap(self._fds[0], self._size, access=mmap.ACCESS_COPY)
        memory = _map_nothing(self._size)
        for number, fd in enumerate(self._fds):
            first = number * self._stripe
            _map_over(memory, first, min(self._stripe, self._size - first), fd)
        return memory

    def fileno(self) -> int:
        (fd,) = self._fds
        return fd

    def close(self) -> None:
        fds, self._fds = self._fds, []
        _run_in_threads(os.close, fds)  # the last one that closes a file waits until its memory is given back

    def __reduce__(self) -> tuple[Any, ...]:
        if sys.platform == "win32":
            raise NotImplementedError("Windows passes no descriptors")
        return _unpickle_files, ([reduction.DupFd(fd) for fd in self._fds], self._size, self._stripe)


def _unpickle_files(fds: Sequence[Any], size: int, stripe: int) -> _Files:
    return _Files([fd.detach() for fd in fds], size, stripe)


def _create(size: int, number: int) -> _NamedMemory | _Files:
    return _NamedMemory(size) if sys.platform == "win32" else _Files.create(size, number)


def _choose_number(size: int) -> int:
    """Return in how many files so many bytes are written fastest."""
    if size < _LARGE or sys.platform != "linux":
        return 1
    return min(_MOST_FILES, len(os.sched_getaffinity(0)))


def _run_in_threads(function: Callable[[int], object], values: Sequence[int]) -> None:
    """Call a function with each value, at the same time where there are several and the system has threads."""
    waiting = iter(values)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for value in waiting:  # each thread takes the next one
                function(value)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in values[1:]]
    with contextlib.suppress(RuntimeError):  # no thread is left: this one does it
        for thread in threads:
            thread.start()
    work()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


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
