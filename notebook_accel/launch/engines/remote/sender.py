"""Reads on a host what is new in the files of a run that outlives its notebook; `mirror` writes it elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from ....events import Event
from ..detached.folder import CELLS, END, JOB, LOG, STOP, TOLD, Folder
from .messages import Piece, Standing

_PIECE_BYTES: Final = 4 << 20
_WHOLE: Final = (TOLD, JOB, CELLS, END)


class Sender:
    """Reads what is new in the folder of a run, on its host.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}  # of files that grow: what was read
        self._versions: dict[str, tuple[int, int]] = {}  # of files that are replaced: time and size

    def read(self) -> list[Event]:
        """Return the next pieces of files, and how the run stands where these are all; events come last."""
        standing = Standing(
            rank=-1,
            time=time.time(),
            is_held=self._folder.is_held,
            has_restarted=self._folder.has_restarted,
        )
        names = sorted(each.name for each in self._folder.path.iterdir())
        events = [piece for name in names if name.startswith("events-") for piece in self._read_next(name)]
        pieces: list[Event] = [*self._read_next(LOG)]
        for name in names:
            if name.startswith("kept-"):  # what the events speak of
                while more := self._read_next(name):
                    pieces += more
            elif name in _WHOLE or name.startswith(STOP):
                pieces += self._read_changed(name)
        return [*pieces, *events] if events else [*pieces, standing]

    def _read_next(self, name: str) -> list[Event]:
        with contextlib.suppress(FileNotFoundError), open(self._folder.path / name, "rb") as file:
            file.seek(self._sizes.get(name, 0))
            if data := file.read(_PIECE_BYTES):
                self._sizes[name] = file.tell()
                return [Piece(rank=-1, time=time.time(), name=name, data=data, begins=False)]
        return []

    def _read_changed(self, name: str) -> list[Event]:
        path = self._folder.path / name
        version = (path.stat().st_mtime_ns, path.stat().st_size)
        if self._versions.get(name) == version:
            return []
        self._versions[name] = version
        return [Piece(rank=-1, time=time.time(), name=name, data=path.read_bytes(), begins=True)]
