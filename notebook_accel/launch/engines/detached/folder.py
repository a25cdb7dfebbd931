"""What a run that outlives its notebook leaves: a folder for each, which only its user can read."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pickle
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from .... import environ, probes
from .... import events as event_classes
from ....errors import LaunchError
from ... import descriptors
from ...job import Job
from ...transfer import cell_sources
from .recording import Alive, Left, Over, Reader, Recording, Snapshot, Stored

VARIABLE: Final = "NOTEBOOK_ACCEL_STATE"
DAYS_VARIABLE: Final = "NOTEBOOK_ACCEL_STATE_DAYS"
LAUNCHED: Final = "launched"
"""The option of a recorded job that says when it was launched, in seconds since the epoch."""
LOG: Final = "job.log"
"""What the process that drives the run has written itself."""
_DAYS: Final = 30.0
_QUEUE_DAYS: Final = 180.0  # that a job may wait in a queue
_DAY_SECONDS: Final = 86_400
TOLD, JOB, CELLS, END, STOP = ("run.json", "job", "cells", "end.json", "stop-")
_LOCK: Final = "lock"
_LAST, _JOB_PREFIX = "last", "job-"
_LOG_LINES: Final = 20
_HEARD_SECONDS: Final = 60.0  # six times as long as a run is ever silent
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class EventReader(Protocol):
    """Reads the events of a run while they are written."""

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""

    def read_events(self) -> list[event_classes.Event]:
        """Return the next events, none where there are no new ones; see `Reader`."""


class Lock:
    """The lock of a run, which no fork of its holder keeps: one may live longer.

    Args:
        fd: its descriptor, which this object owns.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        descriptors.keep_from_forks(self)

    def filenos(self) -> list[int]:
        """Return what no fork keeps."""
        return [self.fd]

    def close(self) -> None:
        """Let go of it."""
        descriptors.forget(self)
        os.close(self.fd)


class Folder:
    """The folder of a run. What it has is pickled, so it is used only where nobody else can write into it.

    Args:
        path: of the folder.

    Attributes:
        path: of the folder.
        recording: where its events are.

    Raises:
        LaunchError: others may write into it, or it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recording = Recording(path)
        try:
            found = path.stat()
        except OSError as error:
            raise LaunchError(f"the folder of the run cannot be read: {error}") from None
        others = stat.S_IWGRP | stat.S_IWOTH
        if found.st_uid != os.getuid() or found.st_mode & others:
            raise LaunchError(f"{path} is not yours alone, and what is in it would be run: nothing is read")

    def open(self) -> None:
        """Make its events readable."""
        return

    def close(self) -> None:
        """Nobody reads its events any more."""
        return

    def wait(self, seconds: float) -> None:
        """Wait for more events."""
        time.sleep(seconds)

    def make_reader(self) -> EventReader:
        """Return what reads its events, from the first one on."""
        return Reader(recording=self.recording)

    @property
    def number(self) -> str:
        """The number of the run, or of its job of SLURM; empty while that is being submitted."""
        return self.job_id if self.path.name.startswith(_JOB_PREFIX) else self.path.name

    @property
    def job_id(self) -> str:
        """The number of its job of SLURM, empty where it has none."""
        return str(self.read_metadata().get("job", ""))

    @property
    def title(self) -> str:
        """What it is called in sentences, such as `run 7` or `job 4711`."""
        return f"{'job' if self.job_id else 'run'} {self.number}"

    @property
    def attach_call(self) -> str:
        """What shows the run again in a notebook."""
        return f"notebook_accel.attach({self.number})"

    def describe_detached(self) -> str:
        """Return how a run is found again that was just launched."""
        end = f"Stop or `scancel {self.number}` ends it" if self.job_id else "Stop ends it"
        title = self.title[0].upper() + self.title[1:]
        return f"{title} goes on without this notebook: {self.attach_call} shows it again. {end}."

    def describe_left(self) -> str:
        """Return how a run is found again that nobody watches here any more."""
        end = f", `scancel {self.number}` ends it" if self.job_id else ""
        return f"{self.title} goes on: {self.attach_call} shows it again{end}"

    @property
    def cluster(self) -> str:
        """The name of the cluster of its job, empty where it has none or nobody knows it."""
        return str(self.read_metadata().get("cluster", ""))

    @property
    def name(self) -> str:
        """The name of the run."""
        return str(self.read_metadata().get("name", "?"))

    def fill(self, job: Job, sources: Mapping[str, list[str]], told: Mapping[str, Any]) -> None:
        """Write what is to run.

        Args:
            job: what runs; its function and arguments are left out.
            sources: lines of the notebook's cells, by the file name under which they were compiled.
            told: what is told of it besides its name.

        Raises:
            OSError: it cannot be written.
        """
        launched = time.time()
        options = {**job.options, "engine": job.engine, LAUNCHED: launched, "detach": False}
        log_dir = None if job.log_dir is None else os.path.abspath(os.path.expanduser(job.log_dir))
        parts = list_parts(replace(job, options=options, log_dir=log_dir))
        found = {"name": job.name, "processes": job.local_world_size, "holds": list(job.holds)}
        self._replace(TOLD, {**_describe_format(), LAUNCHED: launched, **found, **told})
        self.write(JOB, parts)
        self.write(CELLS, sources)

    def add_metadata(self, **told: str) -> None:
        """Tell more of the run.

        Raises:
            OSError: it cannot be written.
        """
        self._replace(TOLD, {**self.read_metadata(), **told})

    def _replace(self, name: str, value: Mapping[str, Any]) -> None:
        part = self.path / f"{name}-{secrets.token_hex(4)}"
        part.write_text(json.dumps(value))
        os.replace(part, self.path / name)

    def write(self, name: str, value: object) -> None:
        """Write a value to a new file; other machines see it then.

        Raises:
            OSError: it cannot be written.
        """
        with open(self.path / name, "xb") as file:
            pickle.dump(value, file, protocol=5)
            file.flush()
            os.fsync(file.fileno())

    def read(self, name: str) -> Any:
        """Return a value that was written."""
        return pickle.loads((self.path / name).read_bytes())

    def forget(self, name: str) -> None:
        """Remove a value."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    def read_metadata(self) -> dict[str, Any]:
        """Return what anybody may know of the run without its pickles; empty where nothing can be read."""
        try:
            return dict(json.loads((self.path / TOLD).read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    @property
    def launched(self) -> float:
        """When the run was launched, in seconds since the epoch; 0 where nobody knows."""
        try:
            return float(self.read_metadata().get(LAUNCHED, 0.0))
        except (TypeError, ValueError):
            return 0.0

    def read_job(self) -> Job:
        """Return what runs, without its function.

        Raises:
            LaunchError: it cannot be read, or another notebook_accel has written it: the events are not read either.
        """
        self._check_format()
        try:
            return Job(**self.read(JOB))
        except Exception as error:  # unpickling has no end of ways to fail
            raise LaunchError(f"{self.path / JOB} cannot be read: {type(error).__name__}: {error}") from error

    def _check_format(self) -> None:
        ours, theirs = _describe_format(), self.read_metadata()
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
            cell_sources.install(self.read(CELLS))

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def ask_to_stop(self, grace: float) -> None:
        """Leave word that the ranks are to stop: an empty file, for which a full disk has room too.

        Raises:
            OSError: it has not.
        """
        (self.path / f"{STOP}{float(grace)}").touch(mode=0o600)

    def read_stop(self) -> float | None:
        """Return the seconds that ranks have, where they are to stop; None where nobody asked."""
        found: list[float] = []
        for each in self.path.glob(f"{STOP}*"):
            with contextlib.suppress(ValueError):
                found.append(float(each.name.removeprefix(STOP)))
        return min((grace for grace in found if math.isfinite(grace)), default=None)

    def note_end(self, status: str) -> None:
        """Note how the run has ended, for those who only list it.

        Args:
            status: a word, see `Run.status`.
        """
        with contextlib.suppress(OSError):  # a full disk
            self._replace(END, {"status": status, "ended": time.time()})

    def read_end(self) -> tuple[str, float] | None:
        """Return how the run has ended, and when in seconds since the epoch; None where nobody has noted it."""
        try:
            found = json.loads((self.path / END).read_text())
            return str(found["status"]), float(found["ended"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def read_log(self) -> list[str]:
        """Return the last lines of what the driver's own process has written."""
        with contextlib.suppress(OSError):
            return (self.path / LOG).read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]
        return []

    # -- whether it lives

    def hold(self) -> Lock:
        """Hold the lock of the run, which lives while any process has its descriptor.

        Raises:
            OSError: the file system has no locks.
        """
        lock = Lock(os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            lock.close()
            raise
        return lock

    @property
    def is_held(self) -> bool:
        """Whether the process lives that drives the run; that of another host does if it has written a moment ago."""
        is_fresh = time.time() - self.find_last_write() < _HEARD_SECONDS
        try:
            lock = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return is_fresh  # it is just being launched, or a job of SLURM drives it
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        # not every network file system tells others of a lock
        return is_fresh and not self.is_local

    @property
    def is_local(self) -> bool:
        """Whether the run is one of this machine."""
        return self.read_metadata().get("host") == socket.gethostname()

    @property
    def has_restarted(self) -> bool:
        """Whether the machine was started again since the launch."""
        return self.is_local and self.read_metadata().get("boot") != find_boot()

    @property
    def has_begun(self) -> bool:
        """Whether the process that drives the run has written."""
        return any(self.path.glob("events-*"))

    def find_last_write(self) -> float:
        """Return when the run has written last, in seconds since the epoch."""
        times = [0.0]
        for each in (self.path, *self.path.glob("events-*")):
            with contextlib.suppress(OSError):
                times.append(each.stat().st_mtime)
        return max(times)


def list_parts(job: Job) -> dict[str, Any]:
    """Return the fields of a job without its function, and without its rendezvous, which may have a secret."""
    parts = {**vars(job.without_work())}
    del parts["rendezvous"]
    return parts


def _describe_format() -> dict[str, str]:
    """Return what has to be the same where a run is recorded and where it is read: pickles hold fields by position."""
    told = [each for each in vars(event_classes).values() if isinstance(each, type)]
    fields = sorted(
        f"{each.__name__}({', '.join(field.name for field in dataclasses.fields(each))})"
        for each in (*told, Over, Alive, Left, Stored, Snapshot, Job)
        if dataclasses.is_dataclass(each)
    )
    return {
        "version": probes.version("notebook-accel") or "without a version",
        "fields": hashlib.sha256("\n".join(fields).encode()).hexdigest()[:16],
    }


def describe_here() -> dict[str, str]:
    """Return what is told of a run on this machine: which one it is, and of its boot."""
    return {"host": socket.gethostname(), "boot": find_boot()}


def find_boot() -> str:
    """Return the id of this start of the machine; empty where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def find_state() -> Path:
    """Return the folder in which this user's runs are."""
    if named := environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "notebook_accel"


def make(*, for_job: bool = False) -> Folder:
    """Return a new, empty folder of a run; its name is the next number. Runs that ended long ago are removed.

    Args:
        for_job: whether a job of SLURM drives the run, which gets a number there.

    Raises:
        LaunchError: it cannot be made.
    """
    prune()
    root = _find_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if for_job:
            path = root / f"{_JOB_PREFIX}{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            return Folder(path)
        number = max(
            _read_last(root), *(int(path.name) for path in root.glob("*") if path.name.isdecimal()), 0
        )
        while True:
            number += 1
            path = root / str(number)
            with contextlib.suppress(FileExistsError):  # another launch of this moment has it
                path.mkdir(mode=0o700)
                (root / _LAST).write_text(str(number))  # a number is never given again
                return Folder(path)
    except OSError as error:
        raise LaunchError(
            f"the run has no folder to write to: {error}; {VARIABLE} names another place"
        ) from error


def _find_root() -> Path:
    return find_state() / "runs"


def _read_last(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((root / _LAST).read_text())
    return 0


def _list_folders() -> list[Folder]:
    """Return all folders of runs, the oldest first; one of a job that was never submitted, too."""
    found: list[Folder] = []
    for path in _find_root().glob("*"):
        if path.name.isdecimal() or path.name.startswith(_JOB_PREFIX):
            with contextlib.suppress(LaunchError):  # it is just being removed, or others may write into it
                found.append(Folder(path))
    return sorted(found, key=lambda each: (each.launched, int(each.number or 0)))


def list_all() -> list[Folder]:
    """Return the folders of all runs that were launched with `detach=True`; the oldest first."""
    return [each for each in _list_folders() if each.number]


def describe_status(folder: Folder) -> str:
    """Return how a run stands, as a word: that of its end, `running`, `lost`, or `submitted` of a job in a queue."""
    end = folder.read_end()
    if folder.job_id:
        is_running = folder.has_begun and folder.is_held
        return end[0] if end is not None else "running" if is_running else "submitted"
    return "running" if folder.is_held else "lost" if end is None else end[0]


def find_holders() -> dict[str, str]:
    """Return the runs that hold devices of this machine and outlive their notebooks, by the ids of devices."""
    found: dict[str, str] = {}
    for folder in list_all():
        told = folder.read_metadata()
        if told.get("holds") and folder.is_local and folder.is_held:
            text = f"{folder.title} ({folder.name}), see notebook_accel.attach({folder.number})"
            found.update(dict.fromkeys(map(str, told["holds"]), text))
    return found


def prune(days: float | None = None) -> list[str]:
    """Remove runs that are over, and return which they were.

    Args:
        days: how long ago they have ended at least; None is as long as such runs are kept. It is a day at least for
            those of other machines, of which nobody knows for certain that they are over, and longer for a job of
            SLURM that has not told its end: it may be in the queue.
    """
    if days is None:
        days = _read_days()
    removed: list[str] = []
    for folder in _list_folders():
        end = folder.read_end()
        last = folder.find_last_write() if end is None else end[1]
        least = days if folder.is_local else max(days, _QUEUE_DAYS if folder.job_id and end is None else 1.0)
        if time.time() - last >= least * _DAY_SECONDS and not folder.is_held:
            removed.append(folder.title)
            folder.remove()
    return removed


def _read_days() -> float:
    text = environ.get(DAYS_VARIABLE) or str(_DAYS)
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not days >= 0:
        raise LaunchError(f"{DAYS_VARIABLE}={text!r}: a number of days is needed")
    return days
