"""The file of a notebook that runs: it has the outputs so far at any time, whole."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_SECONDS: Final = 2.0  # between two writes while a cell runs
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHARE: Final = 0.1  # of all time, which writing may take


class NotebookFile:
    """Writes a notebook again and again while it runs, each time a whole file in the place of the last one.

    A launch that is killed leaves the outputs that came until a few seconds before. Where the file cannot be written
    meanwhile, that is said once, and the cells go on.

    Args:
        book: the notebook; nbclient changes it while cells run.
        path: of the file. A device or a pipe is written at the end only.
        say: shows a sentence.
    """

    def __init__(self, book: Any, path: Path, say: Callable[[str], None]) -> None:
        self._book = book
        self._path = path
        self._say = say
        self._is_file = path.is_file() or not path.exists()
        self._has_changed = True
        self._earliest = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_broken = False

    def start(self) -> None:
        """Write what changes from now on, every few seconds; called in the event loop that runs the cells."""
        if self._timer is None and self._is_file:
            self._tick()

    def note_change(self) -> None:
        """Note that there is something new to write."""
        self._has_changed = True

    def write_soon(self) -> None:
        """Write what is new now, unless writing takes too much of the time."""
        if self._has_changed and self._is_file and time.monotonic() >= self._earliest:
            self._write_meanwhile()

    def close(self) -> None:
        """Write the whole notebook, for the last time.

        Raises:
            OSError: it cannot be written.
        """
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._write()
        except OSError as error:
            if error.errno in _NO_ROOM:  # there is none in the file either: only half of it would be left
                raise
            # perhaps it cannot be replaced, only written: a file that is mounted, or in another's folder
            import nbformat

            nbformat.write(self._book, self._path)

    def _tick(self) -> None:
        self.write_soon()
        self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._tick)

    def _write_meanwhile(self) -> None:
        started = time.monotonic()
        try:
            self._write()
        except OSError as error:
            if not self._is_broken:
                self._say(f"{self._path} cannot be written yet: {error}")
            self._is_broken = True
        now = time.monotonic()
        self._has_changed, self._earliest = False, now + (now - started) / _SHARE

    def _write(self) -> None:
        import nbformat

        if not self._is_file:
            nbformat.write(self._book, self._path)
            return
        path = Path(os.path.realpath(self._path))
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            nbformat.write(self._book, part)
            if path.exists():
                part.chmod(path.stat().st_mode & 0o777)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
