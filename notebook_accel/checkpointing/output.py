"""A new file written by a thread, so that a disk writes while the next bytes are made."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from . import rawio

_BLOCK: Final = 2 << 20
_NUM_BLOCKS: Final = 3


class Output:
    """A file of which the end of the `with` block is the moment from which it is on the disk.

    Bytes are gathered in blocks, and a thread writes them. OSError of the thread is raised by the next `write` or
    by the end of the block; after any error the file is left as it is, for the caller to remove.

    Args:
        path: of the file, which is replaced.
        cached: leave the content in the system's page cache. False writes past it where the system can
            (O_DIRECT, man 2 open), which takes less than half of the time and keeps what else is cached there;
            the next read then comes from the disk.
    """

    def __init__(self, path: Path, *, cached: bool = True) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._file = os.open(path, flags, 0o666)
        self._cached = cached or not rawio.DIRECT
        self._direct = False
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int] | None] = queue.SimpleQueue()
        self._block = mmap.mmap(-1, _BLOCK)  # direct writes need memory that starts with a page
        self._filled = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._error = error  # nothing more is written
        self._full.put((self._block, self._filled))
        self._full.put(None)
        if self._thread is None:
            self._run()
        else:
            self._join(self._thread)
        if error is None:
            self._raise()

    def write(self, data: Any) -> int:
        """Take bytes, or anything with a contiguous buffer, and return how many they were."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            step = min(len(view) - done, _BLOCK - self._filled)
            self._block[self._filled : self._filled + step] = view[done : done + step]
            self._filled += step
            done += step
            if self._filled == _BLOCK:
                self._hand_over()
        return len(view)

    def flush(self) -> None:
        """Do nothing: only the end makes the content durable."""

    def _hand_over(self) -> None:
        if self._thread is None:
            self._start_thread()
        self._raise()
        self._full.put((self._block, _BLOCK))
        self._block = self._free.get()  # the thread gives back every block, after an error too
        self._filled = 0

    def _start_thread(self) -> None:
        for _ in range(_NUM_BLOCKS - 1):
            self._free.put(mmap.mmap(-1, _BLOCK))
        if not self._cached:
            self._set_direct(True)
        thread = threading.Thread(target=self._run, name="checkpoint output", daemon=True)
        thread.start()
        self._thread = thread

    def _join(self, thread: threading.Thread) -> None:
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
        """Write blocks until there is None; the file is closed here, by whoever writes, and by nobody else."""
        while (item := self._full.get()) is not None:
            block, length = item
            self._try(lambda block=block, length=length: self._put(block, length))  # type: ignore[misc]
            self._free.put(block)
        self._try(lambda: os.fsync(self._file))
        os.close(self._file)

    def _try(self, action: Callable[[], None]) -> None:
        if self._error is None:
            try:
                action()
            except BaseException as error:  # raised by the thread that fills the blocks
                self._error = error

    def _put(self, block: mmap.mmap, length: int) -> None:
        with memoryview(block) as view:
            done = 0
            while done < length:
                whole = (length - done) // rawio.PAGE * rawio.PAGE
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
        if sys.platform == "win32":
            return
        import fcntl

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | rawio.DIRECT if wanted else flags & ~rawio.DIRECT)
        except OSError:
            if not wanted:
                raise
            return  # a file system without direct writes
        self._direct = wanted
