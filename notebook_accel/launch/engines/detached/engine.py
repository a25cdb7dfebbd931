"""What engines have in common whose runs can outlive the notebook."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from .... import interrupts
from ....events import Notice, Phase
from ....stream.record import RunRecord
from ...durations import format_duration
from ...job import Job
from ...supervise.control import Control
from ...supervise.delivery import Deliver
from ..base import Engine, Outcome
from .folder import Folder
from .watch import Watch


class DetachingEngine(Engine):
    """An engine whose runs can go on without this process, which shows them by what their folder has."""

    _folder: Folder | None = None  # of a run that outlives this process

    @abstractmethod
    def detach(self, job: Job, record: RunRecord) -> Folder:
        """Start a run that goes on without this process. It is called in a block of `delay_interrupt`.

        Args:
            job: what runs.
            record: of the run.

        Raises:
            LaunchError: it cannot start.
        """

    @abstractmethod
    def make_watch(self, folder: Folder, record: RunRecord, deliver: Deliver, control: Control) -> Watch:
        """Return what shows a run: see `Watch`."""

    @abstractmethod
    def describe_work(self, job: Job) -> str:
        """Return such as `train on 2 processes`."""

    def describe_detached_launch(self, job: Job) -> Sequence[str]:
        """Return what the cell says first of a new run: how it is launched, and remarks."""
        return [f"Launching {self.describe_work(job)}."]

    def run_detached(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Start a run, or take up one that was left, and show it to its end; see `Engine.run`."""
        if job.attached is None:
            try:
                with interrupts.delay_interrupt():  # a run that nobody knows could not be found again
                    self._folder = folder = self.detach(job, record)
            except KeyboardInterrupt:
                if self._folder is None:
                    raise
                control.leave()
                raise KeyboardInterrupt(self._folder.describe_left()) from None
            text, *notes = self.describe_detached_launch(job)
            notes.insert(0, folder.describe_detached())
        else:
            self._folder = folder = job.attached
            folder.open()
            title, since = folder.title, format_duration(time.time() - folder.launched)
            text, notes = (
                f"{title[0].upper()}{title[1:]}: {self.describe_work(job)}, launched {since} ago.",
                [],
            )
        now = time.time()
        told = [Notice(rank=-1, time=now, text=note) for note in notes if note]
        deliver([Phase(rank=-1, time=now, name="starting", detail=text), *told])
        return self.make_watch(folder, record, deliver, control).run()

    def find_left(self, job: Job) -> Job:
        """Return the job with which a run is watched again that was left."""
        return replace(job, attached=self._folder)

    def describe_place(self) -> str:
        """Return the number of a run that outlives this process."""
        return self._folder.title if self._folder is not None else ""

    def describe_interrupt(self, job: Job, record: RunRecord) -> str:
        """Return what has become of a run whose cell was interrupted."""
        if self._folder is not None:
            return self._folder.describe_left()
        return super().describe_interrupt(job, record)
