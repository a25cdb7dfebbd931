"""Writes all output of a run to files, one for each rank."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import LaunchError
from ..events import Event, Lines, Phase
from ..notices import tell
from .sinks import Sink, join_lines


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Make a folder for files of output where there is none, and return its path.

    Args:
        folder: as users write it.

    Raises:
        LaunchError: it cannot be made.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"log_dir={str(folder)!r} cannot be made ({error.strerror}): choose another folder"
        ) from None
    return path


def open_log(path: Path) -> io.TextIOWrapper:
    """Open a file of output to append to; only its user may read one that is made.

    A pipe that nobody reads is an error, and no wait. One whose reader is slow holds the output up.
    """
    return open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_open_at_once)


def _open_at_once(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | os.O_NONBLOCK, 0o600)
    os.set_blocking(descriptor, True)
    return descriptor


class LogFiles(Sink):
    """Appends each rank's lines to `rank_<rank>.log` in a folder, which is made.

    Each run begins with a line of its own. If writing fails, that is reported once, and the run goes on without files.

    Args:
        folder: of the files.
        title: describes the run in the line that begins it.

    Raises:
        LaunchError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], title: str) -> None:
        self._folder = make_folder(folder)
        self._title = title
        self._files: dict[int, io.TextIOWrapper] = {}
        self._broken = False

    def show(self, events: Sequence[Event]) -> None:
        """Write the lines among the events.

        Args:
            events: the next events.
        """
        if self._broken:
            return
        try:
            self._write(events)
        except OSError as error:
            self._give_up(error)

    def _write(self, events: Sequence[Event]) -> None:
        written = set()
        for event in events:
            if isinstance(event, Lines):
                file = self._file(event.rank)
                file.write(join_lines(event.texts))
                written.add(event.rank)
            elif isinstance(event, Phase) and event.name == "restarting":
                self.note(event.detail)
        for rank in written:
            self._files[rank].flush()

    def note(self, text: str) -> None:
        """Write a message of the launcher to every file.

        Args:
            text: one line or several.
        """
        try:
            for file in self._files.values():
                file.write("".join(f"notebook_accel: {line}\n" for line in text.splitlines()))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            try:
                self._files.popitem()[1].close()
            except OSError as error:  # its buffer has lines that cannot be written
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            text = f"the output in {self._folder} is not complete ({error}), the run goes on without it"
            tell(text)

    def _file(self, rank: int) -> io.TextIOWrapper:
        if rank not in self._files:
            path = self._folder / f"rank_{rank}.log"
            file = open_log(path)
            file.write(f"--- {self._title}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            self._files[rank] = file
        return self._files[rank]
