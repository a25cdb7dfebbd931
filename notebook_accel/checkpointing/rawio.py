"""Reads and writes the bytes of tensors by threads, past the system's file cache where that is faster."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import torch

from ..interrupts import delay_interrupt

PAGE: Final = 4096
"""What direct reads and writes are aligned to; disks ask for 512 or this."""
DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
"""The flag for files read and written past the system's cache (man 2 open); 0 where there is none."""

BLOCK: Final = 2 << 20
"""Bytes that are written together."""

_CHUNK: Final = 4 << 20
_FEW: Final = 32 << 20
_GATHERED: Final = 64 << 10
_NUM_BLOCKS: Final = 3
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


def read_at(
    path: Path,
    pieces: Sequence[Piece],
    *,
    cached: bool = False,
    on_read: Callable[[int, int, memoryview], None] | None = None,
) -> None:
    """Fill tensors from a file.

    Args:
        path: of the file.
        pieces: contiguous CPU tensors, each with the byte where its values start.
        cached: read by one thread and leave the content in the system's cache, for a file that is read often.
        on_read: called by threads with what they have just read: the number of the piece, the byte in it, a multiple
            of `PAGE`, and the values from there on.

    Raises:
        OSError: the file cannot be read, or is too short.
    """
    jobs = [
        (index, start, view[start : start + _CHUNK])
        for index, (_, tensor) in enumerate(pieces)
        for view in [memory(tensor)]
        for start in range(0, len(view), _CHUNK)
    ]
    if not jobs:
        return
    few = cached or sum(len(view) for _, _, view in jobs) < _FEW
    with CachedFile(path) if few else _Source(path) as source:

        def read(index: int, start: int, view: memoryview) -> None:
            source.read(pieces[index][0] + start, view)
            if on_read is not None:
                on_read(index, start, view)

        run_jobs([lambda job=job: read(*job) for job in jobs], 1 if few else _THREADS)  # type: ignore[misc]


def sync(path: Path) -> None:
    """Return once the file or folder is on the disk."""
    with delay_interrupt():  # the system does not break off fsync either
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: Path) -> None:
    """Return once the folder, with all its files and folders, is on the disk; links are left out."""
    for where, _, files in os.walk(folder):
        for name in files:
            path = Path(where, name)
            if not path.is_symlink():
                sync(path)
        sync(Path(where))


def run_jobs(jobs: list[Callable[[], None]], num_threads: int) -> None:
    """Run jobs in threads and raise the first error.

    No job runs any more when it returns or raises: an interrupt waits for the jobs that have begun. An executor of
    `concurrent.futures` would refuse jobs while the interpreter ends. Where no thread can be started, as Python 3.12
    refuses it by then, this thread runs all jobs.

    Args:
        jobs: what to run.
        num_threads: how many run at a time, this thread included.
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
            if not _start(thread):
                break
        run()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except BaseException as error:  # an interrupt
        errors.append(error)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


def _start(thread: threading.Thread) -> bool:
    """Start a thread; return False where there can be none: at the end of the interpreter, or at a limit."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class CachedFile:
    """An open file, read through the system's cache by any number of threads.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = io.FileIO(path)  # closes itself where an interrupt keeps us from it
        self._file = self._opened.fileno()

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._opened.close()

    def read(self, offset: int, view: memoryview) -> None:
        """Fill a view of writable memory from this byte on; OSError if the file is too short."""
        while view:
            got = os.preadv(self._file, [view], offset)
            if not got:
                raise OSError(f"{self._path} ends before its byte {offset + len(view)}")
            offset, view = offset + got, view[got:]


class _Source(CachedFile):
    """An open file; what the system has not cached is read past its cache, which is faster and keeps the cache."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._direct: io.FileIO | None = None
        self._blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._residence = _Residence(self._file)
        if DIRECT:
            try:
                self._direct = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | DIRECT))
            except OSError:  # a file system without direct reads
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)
        if self._direct is not None:
            self._direct.close()

    def read(self, offset: int, view: memoryview) -> None:
        """Fill the view from this byte on, at most _CHUNK bytes."""
        if self._direct is not None and not self._residence.is_cached(offset, len(view)):
            got = self._read_direct(self._direct.fileno(), offset, view)
            offset, view = offset + got, view[got:]
        super().read(offset, view)

    def _read_direct(self, file: int, offset: int, view: memoryview) -> int:
        """Fill as much of the view as the file system is ready to read directly, and return how much."""
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


class _Residence:
    """What of a file the system has cached, by mincore (man 2 mincore); all of it where that cannot be asked."""

    def __init__(self, file: int) -> None:
        self._mincore = None
        size = os.fstat(file).st_size
        if not DIRECT or size == 0:
            return
        # Writable, because ctypes gives the address of writable memory only. Without NORESERVE, which says that no
        # page will be written, the system refuses a mapping that is larger than its memory.
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


@contextmanager
def create(
    path: Path, *, cached: bool = True, on_block: Callable[[memoryview], None] = lambda block: None
) -> Iterator[BinaryIO]:
    """Open a new file, or replace one; the end of the `with` block is the moment from which it is on the disk.

    Args:
        path: of the file. After an error it is left as it is, for the caller to remove.
        cached: leave the content in the system's page cache. False writes past it where the system can
            (O_DIRECT, man 2 open), which takes less than half of the time and keeps what else is cached there;
            the next read then comes from the disk.
        on_block: called with each part of the content in order, by the thread that writes it; all but the last one
            have `BLOCK` bytes.

    Raises:
        OSError: the file cannot be written; the next `write` or the end of the block raises it.
    """
    with Output(path, cached=cached, on_block=on_block) as output:
        file = io.BufferedWriter(output, _GATHERED)  # torch.save writes a few bytes at a time
        yield file
        file.flush()


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Let an OSError of a write say which file was written: the system tells that of one that cannot be opened only.

    Args:
        path: the file, by the name that the user knows.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


class Output(io.RawIOBase):
    """A new file that a thread writes, so that a disk writes while the next bytes are made; see `create`.

    Bytes are gathered in blocks, and the thread writes these.
    """

    _thread: threading.Thread | None = None  # also where an interrupt comes before the object is whole

    def __init__(
        self,
        path: Path,
        *,
        cached: bool = True,
        on_block: Callable[[memoryview], None] = lambda block: None,
    ) -> None:
        self._opened = io.FileIO(path, "w")  # closes itself where an interrupt keeps us from it
        self._file = self._opened.fileno()
        self._cached = cached or not DIRECT
        self._on_block = on_block
        self._direct = False
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int] | None] = queue.SimpleQueue()
        self._block = mmap.mmap(-1, BLOCK)  # direct writes need memory that starts with a page
        self._filled = 0
        self._alone = False  # no thread can be started
        self._writing = threading.Lock()
        self._error: BaseException | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        cause = self._error
        if error is not None:
            self._error = error  # nothing more is written
        self._full.put((self._block, self._filled))
        self._full.put(None)
        self.close()
        if self._thread is not None:
            self._join(self._thread)
        self._run()
        if error is None:
            self._raise()
        elif isinstance(cause, OSError) and isinstance(error, RuntimeError):
            raise cause from None  # torch's zip writer raises its own error once a write has failed

    def close(self) -> None:
        """Let the thread end; garbage collection does so too, where an interrupt comes before the end of the block."""
        if self._thread is not None:
            self._full.put(None)
        super().close()

    def writable(self) -> bool:
        """Return True, which `io.BufferedWriter` asks for."""
        return True

    def write(self, data: Any) -> int:
        """Take bytes, or anything with a contiguous buffer, and return how many they were."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            step = min(len(view) - done, BLOCK - self._filled)
            self._block[self._filled : self._filled + step] = view[done : done + step]
            self._filled += step
            done += step
            if self._filled == BLOCK:
                self._hand_over()
        return len(view)

    def _hand_over(self) -> None:
        if self._thread is None:
            self._start_thread()
        self._raise()
        self._full.put((self._block, BLOCK))
        if self._alone:
            self._write_next()
        self._block = self._free.get()  # the thread gives back every block, after an error too
        self._filled = 0

    def _start_thread(self) -> None:
        for _ in range(_NUM_BLOCKS - 1):
            self._free.put(mmap.mmap(-1, BLOCK))
        if not self._cached:
            self._set_direct(True)
        self._thread = threading.Thread(target=self._run, name="checkpoint output", daemon=True)
        self._alone = not _start(self._thread)

    def _join(self, thread: threading.Thread) -> None:
        if thread.ident is None:  # it could not start, or an interrupt came when it was to
            return
        try:
            thread.join()
        except BaseException as interrupt:
            self._error = interrupt  # nothing more is written, so that this takes no time
            thread.join()
            raise

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Write blocks until there is None; the file is closed here, by whoever writes, and by nobody else.

        Whoever comes second finds nothing to do.
        """
        with self._writing:
            try:
                while self._write_next():
                    pass
                if not self._opened.closed:
                    self._try(lambda: os.fsync(self._file))
            finally:
                self._opened.close()

    def _write_next(self) -> bool:
        """Write the next block; return False where there is none any more."""
        item = self._full.get()
        if item is not None:
            self._try(lambda: self._put(*item))
            self._free.put(item[0])
        else:
            self._full.put(None)  # for whoever looks next
        return item is not None

    def _try(self, action: Callable[[], None]) -> None:
        if self._error is None:
            try:
                action()
            except BaseException as error:  # raised by the thread that fills the blocks
                self._error = error

    def _put(self, block: mmap.mmap, length: int) -> None:
        with memoryview(block) as view:
            with view[:length] as filled:
                self._on_block(filled)
            done = 0
            while done < length:
                whole = (length - done) // PAGE * PAGE
                if self._direct and not whole:
                    self._set_direct(False)
                try:
                    done += os.write(
                        self._file, view[done : done + whole] if self._direct else view[done:length]
                    )
                except OSError as error:
                    if not self._direct or error.errno != errno.EINVAL:
                        raise
                    self._set_direct(False)  # a file system with other rules of alignment, or none

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | DIRECT if wanted else flags & ~DIRECT)
        except OSError:
            if not wanted:
                raise
            return  # a file system without direct writes
        self._direct = wanted
