"""What a job that goes on without its notebook leaves for others: a folder that nodes and notebooks share."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pickle
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .... import environ, probes
from .... import events as event_classes
from ....errors import LaunchError
from ....events import Event, Failure, Held, Lines, Phase, Progress, Pulse, RaisedError, Unfinished
from ....stream.wire import FrameReader, frame
from ...job import Job
from ...transfer import cell_sources
from ...transfer.pickled import Pickled
from ..remote.client import Wanted
from ..remote.hosts_engine import Origin
from .submission import LOG

VARIABLE: Final = "NOTEBOOK_ACCEL_JOBS"
LAUNCHED: Final = "launched"
"""The option of a recorded job that says when it was launched, in seconds since the epoch."""
FOLDER: Final = "folder"
"""The option of a job that is watched again that has its folder."""
_OPTIONS: Final = ("num_nodes", "slurm", "slurm_keep", "slurm_notice", "python", "environment")
CLUSTER: Final = "cluster"
"""What the format of a recording has beside it: the name of its cluster."""
_FORMAT: Final = "format"
_SUBMITTED: Final = "submitted"
_JOB: Final = "job"
_CELLS: Final = "cells"
_WORK: Final = "work"
_STOP: Final = "stop"
_ATTEMPT: Final = "attempt"
_READ_BYTES: Final = 4 << 20
_SYNC_SECONDS: Final = 1.0  # other machines see what is synced
_SLOWEST_SECONDS: Final = 10.0
_SLOWER_AFTER: Final = 600.0
_LAST_SECONDS: Final = 600.0
_MAX_WAITING: Final = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Over(Event):
    """The run has ended; nothing follows.

    Attributes:
        stopped: ranks that were ended.
        was_stopped: whether somebody asked for that.
        hang: the report of the hang that ended it, else empty.
        error: what ended it, where that is no failure of a rank.
        was_asked: whether somebody asked the run to stop, and its ranks have perhaps returned by themselves.
    """

    stopped: Sequence[int] = ()
    was_stopped: bool = False
    hang: str = ""
    error: RaisedError | None = None
    was_asked: bool = False  # the last one: recordings of before have four


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive(Event):
    """The job's process can write; told where there was nothing else to write for some time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Event):
    """SLURM ends the job, and nothing follows of this start of it; SLURM says how it ended, or starts it again."""


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


class Folder:
    """The folder of a run. What it has is pickled, so it is used only where nobody else can write into it.

    Args:
        path: of the folder.

    Raises:
        LaunchError: others may write into it, or it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = path.stat()
        except OSError as error:
            raise LaunchError(f"the folder of the run cannot be read: {error}") from None
        others = stat.S_IWGRP | stat.S_IWOTH
        if found.st_uid != os.getuid() or found.st_mode & others:
            raise LaunchError(f"{path} is not yours alone, and what is in it would be run: nothing is read")

    @classmethod
    def make(cls, job: Job, work: Work, cluster: str) -> Folder:
        """Make the folder of a run that is to be submitted.

        Args:
            job: what runs; its function and arguments are in `work`.
            work: what the job runs.
            cluster: name of the cluster, empty where nobody knows it.

        Raises:
            LaunchError: it cannot be made, or not be filled.
        """
        options = {name: job.options[name] for name in _OPTIONS} | {LAUNCHED: time.time(), "detach": False}
        log_dir = None if job.log_dir is None else os.path.abspath(job.log_dir)
        parts = vars(replace(job.without_work(), options=options, log_dir=log_dir))
        told = {name: value for name, value in parts.items() if name != "rendezvous"}  # it may have a secret
        root = find_root()
        path = root / f"run-{secrets.token_hex(8)}"
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
            told_first = _describe_format() | {LAUNCHED: options[LAUNCHED], CLUSTER: cluster}
            (path / _FORMAT).write_text(json.dumps(told_first))
            for name, value in ((_JOB, told), (_CELLS, work.origin.notes.sources), (_WORK, work)):
                with open(path / name, "xb") as file:
                    pickle.dump(value, file, protocol=5)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)  # else a full disk would stay full
            raise LaunchError(
                f"the run cannot be left to its job: {error}; {VARIABLE} names another folder, which the nodes see too"
            ) from error
        return cls(path)

    @property
    def cluster(self) -> str:
        """The name of the cluster that the run was submitted to, empty where nobody knows it."""
        return str(read_format(self.path).get(CLUSTER, ""))

    def note_submission(self, moment: float) -> None:
        """Note when SLURM took the job, in seconds since the epoch."""
        with contextlib.suppress(OSError):  # a full disk
            (self.path / _SUBMITTED).write_text(repr(moment))

    def read_submission(self) -> float | None:
        """Return when SLURM took the job; None where nobody knows."""
        with contextlib.suppress(OSError, ValueError):
            return float((self.path / _SUBMITTED).read_text())
        return None

    def read_job(self) -> Job:
        """Return what runs, without its function.

        Raises:
            LaunchError: it cannot be read, or another notebook_accel has written it: the events are not read either.
        """
        self._check_format()
        try:
            return Job(**pickle.loads((self.path / _JOB).read_bytes()))
        except Exception as error:  # unpickling has no end of ways to fail
            raise LaunchError(
                f"{self.path / _JOB} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _check_format(self) -> None:
        ours, theirs = _describe_format(), read_format(self.path)
        if {name: theirs.get(name) for name in ours} != ours:
            version = theirs.get("version", "another version")
            which = f"another state of {version}" if version == ours["version"] else version
            raise LaunchError(
                f"{self.path} was written by notebook_accel {which}, and this is {ours['version']}, which does not "
                "understand it: use the one that launched the run, in notebooks and on nodes"
            )

    def install_cells(self) -> None:
        """Let tracebacks show the lines of cells of the notebook that launched the run, where they can be read."""
        with contextlib.suppress(Exception):  # unpickling has no end of ways to fail; the value is worth more
            cell_sources.install(pickle.loads((self.path / _CELLS).read_bytes()))

    def read_work(self) -> Work:
        """Return what the job runs."""
        found = pickle.loads((self.path / _WORK).read_bytes())
        assert isinstance(found, Work)
        return found

    def remove(self) -> None:
        """Remove it: its job was not submitted."""
        shutil.rmtree(self.path, ignore_errors=True)

    def forget_work(self) -> None:
        """Remove what the job runs: it has ended."""
        with contextlib.suppress(OSError):
            (self.path / _WORK).unlink()

    def find_events(self, attempt: int) -> Path:
        """Return the path of what one start of the job tells; SLURM may start it again."""
        return self.path / f"events-{attempt}"

    def find_next(self, attempt: int) -> int | None:
        """Return the start of the job that came after one and told something; None where there is none.

        A start that was ended before it told anything has left nothing.
        """
        names = [each.name.rpartition("-")[2] for each in self.path.glob("events-*")]
        return min((int(name) for name in names if name.isdecimal() and int(name) > attempt), default=None)

    def ask_to_stop(self, grace: float) -> None:
        """Leave word that the ranks are to stop."""
        part = self.path / f"{_STOP}-{secrets.token_hex(4)}"
        part.write_text(repr(float(grace)))
        os.replace(part, self.path / _STOP)

    def read_stop(self) -> float | None:
        """Return the seconds that ranks have, where they are to stop; None where nobody asked."""
        try:
            return float((self.path / _STOP).read_text())
        except (OSError, ValueError):
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

    def read_log(self) -> list[str]:
        """Return the last lines of what the job's own process has written."""
        with contextlib.suppress(OSError):
            return (self.path / LOG).read_text("utf-8", "replace").splitlines()[-20:]
        return []


def _describe_format() -> dict[str, str]:
    """Return what has to be the same where a run is recorded and where it is read: pickles hold fields by position."""
    told = [each for each in vars(event_classes).values() if isinstance(each, type)]
    fields = sorted(
        f"{each.__name__}({', '.join(field.name for field in dataclasses.fields(each))})"
        for each in (*told, Over, Alive, Left, Job)
        if dataclasses.is_dataclass(each)
    )
    return {
        "version": probes.version("notebook-accel") or "without a version",
        "fields": hashlib.sha256("\n".join(fields).encode()).hexdigest()[:16],
    }


def find_root() -> Path:
    """Return the folder with the runs of this user, which nodes have to see too."""
    return Path(environ.get(VARIABLE) or "~/.notebook_accel/jobs").expanduser().absolute()


def read_format(path: Path) -> dict[str, Any]:
    """Return what the folder of a run says of its pickles; empty where nothing can be read."""
    try:
        return dict(json.loads((path / _FORMAT).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


class Writer:
    """Writes the events of a run to a file. Of bars and pulses it writes the newest state, in longer and longer steps.

    Where the disk is full, it keeps what is to be written, and tries again.

    Args:
        path: of the file, which is made.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._waiting = bytearray()
        self._changing: dict[tuple[object, ...], Event] = {}
        self._began = self._synced = self._drawn = self._added = time.monotonic()
        self._is_dirty = self._is_refused = False

    def write(self, events: Sequence[Event]) -> None:
        """Write events, and what is due.

        Args:
            events: in order; it is called several times a second, also without any.

        Raises:
            OSError: nothing can be written, and too much waits.
        """
        for event in events:
            self._take(event)
        now = time.monotonic()
        if self._changing and now - self._drawn >= min(
            _SLOWEST_SECONDS, 1 + (now - self._began) / _SLOWER_AFTER
        ):
            self._flush_changing()
        if now - self._added >= _SLOWEST_SECONDS:
            self._add(Alive(rank=-1, time=time.time()))
        self._send()
        if self._is_dirty and now - self._synced >= _SYNC_SECONDS:
            self._sync()

    def close(self, over: Over) -> None:
        """Write the end of the run; a full disk is waited for, some minutes.

        Raises:
            OSError: it stays full.
        """
        self._flush_changing()
        self._add(over)
        deadline = time.monotonic() + _LAST_SECONDS
        self._send()
        while self._waiting:
            if time.monotonic() > deadline:
                raise OSError(
                    errno.ENOSPC, f"{len(self._waiting)} bytes of what the run said could not be written"
                )
            time.sleep(_SYNC_SECONDS)
            self._send()
        self._sync()
        os.close(self._file)

    def leave(self) -> None:
        """Write what is there, without an end of the run: the job may start again, or SLURM says how it ended."""
        self._flush_changing()
        self._add(Left(rank=-1, time=time.time()))
        self._send()
        self._sync()
        os.close(self._file)

    def _take(self, event: Event) -> None:
        if isinstance(event, Held):
            return  # between launcher and rank
        if isinstance(event, Phase) and event.name == "restarting":
            self._changing.clear()
        key = _find_key(event)
        if key is not None:
            if isinstance(event, Lines) or (isinstance(event, Progress) and event.finished):
                self._changing.pop(key, None)
            else:
                self._changing[key] = event
                return
        self._add(event)

    def _add(self, event: Event) -> None:
        if isinstance(event, Pulse):
            event = replace(event, moment=None)  # clock and processes of this machine say nothing elsewhere
        elif isinstance(event, Failure):
            event = replace(event, moment=None, alive=None)
        elif isinstance(event, Phase):
            event = replace(event, pid=None)
        self._added = time.monotonic()
        for part in frame(event):
            self._waiting += part

    def _flush_changing(self) -> None:
        self._drawn = time.monotonic()
        for event in self._changing.values():
            self._add(event)
        self._changing.clear()

    def _send(self) -> None:
        try:
            while self._waiting:
                written = os.write(self._file, self._waiting[:_READ_BYTES])
                del self._waiting[:written]
                self._is_dirty, self._is_refused = True, False
        except OSError as error:
            if not self._is_refused:
                with contextlib.suppress(OSError):  # it goes to the same disk
                    print(f"what the run says cannot be written: {error}", file=sys.stderr, flush=True)
            self._is_refused = True
            if len(self._waiting) > _MAX_WAITING:
                raise

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # told where it is written
            os.fsync(self._file)
        self._synced, self._is_dirty = time.monotonic(), False


def _find_key(event: Event) -> tuple[object, ...] | None:
    """Return what an event is the state of; None where it is no state that the next one replaces."""
    if isinstance(event, Pulse):
        return ("pulse", event.rank)
    if isinstance(event, Progress):
        return ("bar", event.rank, event.bar)
    if isinstance(event, (Lines, Unfinished)):
        return ("row", event.rank, event.stream)
    return None


class Reader:
    """Reads the events of a run, while they are written on another machine.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._attempt = -1
        self._position = 0
        self._frames = FrameReader()

    @property
    def has_begun(self) -> bool:
        """Whether the job's process has started."""
        return self._position > 0 or self._attempt >= 0

    def read(self) -> list[Event]:
        """Return the next events, none where there are no new ones; of all starts of the job, one after the other."""
        while True:
            following = self._folder.find_next(self._attempt)  # before: all of this one is there then
            if data := self._read_bytes():
                if events := self._frames.feed(data):
                    return events
            elif following is None:
                return []
            else:
                self._attempt, self._position, self._frames = following, 0, FrameReader()

    def _read_bytes(self) -> bytes:
        try:
            # opened anew: a file of another machine shows what is new only then
            with open(self._folder.find_events(self._attempt), "rb", buffering=0) as file:
                file.seek(self._position)
                data: Any = file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        return bytes(data)
