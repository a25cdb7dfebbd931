"""Bytes of tensors from files, by several threads and without a copy where the system has the file cached."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

PAGE: Final = 4096
"""What direct reads and writes are aligned to; disks ask for 512 or this."""
DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
"""The flag for files read and written past the system's cache (man 2 open); 0 where there is none."""

_CHUNK: Final = 4 << 20
_FEW: Final = 32 << 20
_NORESERVE: Final = 0x4000  # Linux's; Python knows it from 3.11 on
_THREADS: Final = 4

Piece = tuple[int, torch.Tensor]
"""Where in the file a tensor starts, and the tensor."""


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which they keep alive."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def read_at(path: Path, pieces: Sequence[Piece], *, cached: bool = False) -> None:
    """Fill contiguous CPU tensors from the file; OSError where it is too short.

    `cached` leaves what is read in the system's cache, for a file that is read again and again, and uses one thread.
    """
    if cached:
        for offset, tensor in pieces:
            _read_cached(path, offset, memory(tensor))
        return
    with _Source(path) as source:
        jobs = []
        for offset, tensor in pieces:
            view = memory(tensor)
            for start in range(0, len(view), _CHUNK):
                jobs.append((offset + start, view[start : start + _CHUNK]))
        few = sum(len(view) for _, view in jobs) < _FEW
        read = source.read_cached if few else source.read
        work_off([lambda job=job: read(*job) for job in jobs], 1 if few else _THREADS)  # type: ignore[misc]


def sync(path: Path) -> None:
    """Return once the file, or on systems that know this the folder, is on the disk."""
    if os.name == "nt":
        if path.is_file():
            with open(path, "r+b") as file:
                os.fsync(file.fileno())
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def work_off(jobs: list[Callable[[], None]], num_threads: int) -> None:
    """Do all jobs and raise the first error; an executor would refuse them while the interpreter ends.

    Nothing runs any more when it returns or raises: an interrupt waits for the jobs that were begun.
    """
    waiting = iter(jobs)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                job = next(waiting, None)
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # raised by the caller's thread
                errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(num_threads, len(jobs)) - 1)]
    try:
        for thread in threads:
            thread.start()
        run()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt
        errors.append(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


class _Source:
    """An open file; what the system has not cached is read past its cache, which is faster and keeps the cache."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._direct: int | None = None
        self._blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        with open(path, "rb") as file:
            self._residence = _Residence(file.fileno())
        if DIRECT:
            try:
                self._direct = os.open(path, os.O_RDONLY | DIRECT)
            except OSError:  # a file system without direct reads
                return

    def __enter__(self) -> _Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def read(self, offset: int, view: memoryview) -> None:
        """Fill the view from this byte on, at most _CHUNK bytes."""
        if self._direct is not None and not self._residence.is_cached(offset, len(view)):
            got = self._read_direct(self._direct, offset, view)
            offset, view = offset + got, view[got:]
        if view:
            self.read_cached(offset, view)

    def read_cached(self, offset: int, view: memoryview) -> None:
        """Fill the view through the system's cache."""
        _read_cached(self._path, offset, view)

    def _read_direct(self, file: int, offset: int, view: memoryview) -> int:
        """Fill as much of the view as the file system is ready to read directly, and return how much."""
        if sys.platform == "win32":
            return 0
        try:
            block = self._blocks.get_nowait()
        except queue.Empty:
            block = mmap.mmap(-1, _CHUNK + PAGE)  # starts with a page, as direct reads need
        before = offset % PAGE
        ask = -(-(before + len(view)) // PAGE) * PAGE
        with memoryview(block) as space:
            try:
                got = os.preadv(file, [space[:ask]], offset - before) - before
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                got = 0  # other rules of alignment
            got = max(0, min(got, len(view)))
            view[:got] = space[before : before + got]
        self._blocks.put(block)
        return got


def _read_cached(path: Path, offset: int, view: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while view:
            got = file.readinto(view)
            if not got:
                raise OSError(f"{path} ends before its byte {file.tell() + len(view)}")
            view = view[got:]


class _Residence:
    """What of a file the system has cached, by mincore (man 2 mincore); all of it where that cannot be asked."""

    def __init__(self, file: int) -> None:
        self._mincore = None
        size = os.fstat(file).st_size
        if sys.platform == "win32" or not DIRECT or size == 0:
            return
        # Writable, so that ctypes gives its address. The system counts such memory, more of which than it has may
        # not be asked for, unless it is told that no page will be written.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
        try:
            self._map = mmap.mmap(file, size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:  # a limit on a process's addresses (man 2 setrlimit)
            return
        self._mincore = getattr(ctypes.CDLL(None), "mincore", None)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def is_cached(self, offset: int, length: int) -> bool:
        """Return True if all these bytes are cached."""
        if self._mincore is None:
            return True
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        pages = -(-(offset + length - start) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        address, extent = ctypes.c_void_p(self._base + start), ctypes.c_size_t(offset + length - start)
        return self._mincore(address, extent, found) != 0 or all(byte & 1 for byte in found)
