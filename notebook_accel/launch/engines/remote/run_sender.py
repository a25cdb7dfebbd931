"""Reads on a host the events of a run that outlives its notebook, for a notebook elsewhere; see `host_run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ....events import Event
from ..detached.folder import CELLS, JOB, Folder, list_all
from ..detached.recording import Reader
from .messages import Standing, Watched


def find_run(run: str | None) -> Folder | None:
    """Return the folder of a run that this machine drives, None where there is none.

    Args:
        run: its number, or its name, of which the newest counts; None is the one that was launched last.
    """
    found = [each for each in list_all() if not each.job_id and run in (None, each.number, each.name)]
    return found[-1] if found else None


class RunSender:
    """Reads what a run has said, from its beginning on.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._reader = Reader(recording=folder.recording)
        self._thread = ThreadPoolExecutor(1)  # a large value takes longer than an agent may be silent
        self._reading: Future[list[Event]] | None = None
        self._is_held = True

    def describe(self) -> Watched:
        """Return what a notebook has to know of the run before its events."""
        folder = self.folder
        return Watched(
            rank=-1,
            time=time.time(),
            number=folder.number,
            path=str(folder.path),
            metadata=folder.read_metadata(),
            files={name: (folder.path / name).read_bytes() for name in (JOB, CELLS)},
        )

    def read(self, seconds: float) -> Sequence[Event]:
        """Return the next events, or how the run stands where there are none; nothing where that takes longer.

        Args:
            seconds: how long to wait at most.
        """
        if self._reading is None:
            self._is_held = self.folder.is_held  # before its last events are looked for
            self._reading = self._thread.submit(self._reader.read_events)
        if not wait([self._reading], seconds).done:
            return []
        events, self._reading = self._reading.result(), None
        return events or [self._describe_standing()]

    def _describe_standing(self) -> Standing:
        return Standing(
            rank=-1,
            time=time.time(),
            is_held=self._is_held,
            has_restarted=self.folder.has_restarted,
            stop=self.folder.read_stop(),
            log=[] if self._is_held else self.folder.read_log(),
        )
