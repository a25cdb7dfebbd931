"""The folder of a run whose ranks a job of SLURM starts: nodes and notebooks share it."""

from __future__ import annotations

import contextlib
import pickle
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .... import environ
from ....errors import LaunchError
from ...job import Job
from ...transfer.pickled import Pickled
from ..detached.folder import Folder, find_state
from ..remote.client import Wanted
from ..remote.hosts_engine import Origin

VARIABLE: Final = "NOTEBOOK_ACCEL_JOBS"
CLUSTER: Final = "cluster"
"""What is told of a run besides: the name of its cluster."""
_SUBMITTED: Final = "submitted"
_ATTEMPT: Final = "attempt"
_WORK: Final = "work"


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the job runs.

    Attributes:
        pickled: the function with its arguments.
        origin: what its ranks take from the process that launched it.
        wanted: what the environment of the nodes has to be: that process's.
    """

    pickled: Pickled
    origin: Origin
    wanted: Wanted


class JobFolder(Folder):
    """The folder of a job's run; see `Folder`."""

    @classmethod
    def make(cls, job: Job, work: Work, cluster: str) -> JobFolder:
        """Make the folder of a run that is to be submitted.

        Args:
            job: what runs; its function and arguments are in `work`.
            work: what the job runs.
            cluster: name of the cluster, empty where nobody knows it.

        Raises:
            LaunchError: it cannot be made, or not be filled.
        """
        path = find_root() / f"run-{secrets.token_hex(8)}"
        try:
            path.mkdir(mode=0o700, parents=True)
            folder = cls(path)
            try:
                folder.fill(job, work.origin.notes.sources, {CLUSTER: cluster})
                folder.write(_WORK, work)
            except BaseException:
                folder.remove()  # else a full disk would stay full
                raise
        except OSError as error:
            raise LaunchError(
                f"the run cannot be left to its job: {error}; {VARIABLE} names another folder, which the nodes see too"
            ) from error
        return folder

    @property
    def cluster(self) -> str:
        """The name of the cluster that the run was submitted to, empty where nobody knows it."""
        return str(self.read_metadata().get(CLUSTER, ""))

    def read_work(self) -> Work:
        """Return what the job runs."""
        found = pickle.loads((self.path / _WORK).read_bytes())
        assert isinstance(found, Work)
        return found

    def forget_work(self) -> None:
        """Remove what the job runs: it has ended."""
        with contextlib.suppress(OSError):
            (self.path / _WORK).unlink()

    def note_submission(self, moment: float) -> None:
        """Note when SLURM took the job, in seconds since the epoch."""
        with contextlib.suppress(OSError):  # a full disk
            (self.path / _SUBMITTED).write_text(repr(moment))

    def read_submission(self) -> float | None:
        """Return when SLURM took the job; None where nobody knows."""
        with contextlib.suppress(OSError, ValueError):
            return float((self.path / _SUBMITTED).read_text())
        return None

    def note_attempt(self, number: int) -> None:
        """Note that the ranks start again, for the next start of the job.

        Args:
            number: of the attempt, from 0.
        """
        with contextlib.suppress(OSError):  # a full disk
            (self.path / _ATTEMPT).write_text(str(number))

    def read_attempt(self) -> int:
        """Return the number of the last attempt; 0 where the ranks have not started again."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / _ATTEMPT).read_text())
        return 0


def find_root() -> Path:
    """Return the folder with the jobs of this user, which nodes have to see too."""
    if named := environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    return find_state() / "jobs"
