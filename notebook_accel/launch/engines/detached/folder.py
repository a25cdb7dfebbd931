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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from .... import environ, probes
from .... import events as event_classes
from ....errors import LaunchError
from ... import descriptors
from ...job import Job
from ...transfer import cell_sources
from .recording import Alive, Left, Over, Recording, Snapshot, Stored

VARIABLE: Final = "NOTEBOOK_ACCEL_STATE"
DAYS_VARIABLE: Final = "NOTEBOOK_ACCEL_STATE_DAYS"
LAUNCHED: Final = "launched"
"""The option of a recorded job that says when it was launched, in seconds since the epoch."""
LOG: Final = "job.log"
"""What the process that drives the run has written itself."""
_DAYS: Final = 30.0
_DAY_SECONDS: Final = 86_400
_TOLD, _JOB, _CELLS, _LOCK, _END, _STOP = ("run.json", "job", "cells", "lock", "end.json", "stop-")
_LAST: Final = "last"
_LOG_LINES: Final = 20
_HEARD_SECONDS: Final = 60.0  # six times as long as a run is ever silent
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


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
        number: of the run, or of its job.
        recording: where its events are.

    Raises:
        LaunchError: others may write into it, or it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, path.name
        self.recording = Recording(path)
        try:
            found = path.stat()
        except OSError as error:
            raise LaunchError(f"the folder of the run cannot be read: {error}") from None
        others = stat.S_IWGRP | stat.S_IWOTH
        if found.st_uid != os.getuid() or found.st_mode & others:
            raise LaunchError(f"{path} is not yours alone, and what is in it would be run: nothing is read")

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
        log_dir = None if job.log_dir is None else os.path.abspath(job.log_dir)
        parts = {**vars(replace(job.without_work(), options=options, log_dir=log_dir))}
        del parts["rendezvous"]  # it may have a secret
        found = {"name": job.name, "processes": job.local_world_size, "holds": list(job.holds)}
        (self.path / _TOLD).write_text(
            json.dumps({**_describe_format(), LAUNCHED: launched, **found, **told})
        )
        self.write(_JOB, parts)
        self.write(_CELLS, sources)

    def write(self, name: str, value: object) -> None:
        """Write a value to a new file; other machines see it then.

        Raises:
            OSError: it cannot be written.
        """
        with open(self.path / name, "xb") as file:
            pickle.dump(value, file, protocol=5)
            file.flush()
            os.fsync(file.fileno())

    def read_metadata(self) -> dict[str, Any]:
        """Return what anybody may know of the run without its pickles; empty where nothing can be read."""
        try:
            return dict(json.loads((self.path / _TOLD).read_text()))
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
            return Job(**pickle.loads((self.path / _JOB).read_bytes()))
        except Exception as error:  # unpickling has no end of ways to fail
            raise LaunchError(
                f"{self.path / _JOB} cannot be read: {type(error).__name__}: {error}"
            ) from error

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
            cell_sources.install(pickle.loads((self.path / _CELLS).read_bytes()))

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def ask_to_stop(self, grace: float) -> None:
        """Leave word that the ranks are to stop: an empty file, for which a full disk has room too.

        Raises:
            OSError: it has not.
        """
        (self.path / f"{_STOP}{float(grace)}").touch(mode=0o600)

    def read_stop(self) -> float | None:
        """Return the seconds that ranks have, where they are to stop; None where nobody asked."""
        found: list[float] = []
        for each in self.path.glob(f"{_STOP}*"):
            with contextlib.suppress(ValueError):
                found.append(float(each.name.removeprefix(_STOP)))
        return min((grace for grace in found if math.isfinite(grace)), default=None)

    def note_end(self, status: str) -> None:
        """Note how the run has ended, for those who only list it.

        Args:
            status: a word, see `Run.status`.
        """
        with contextlib.suppress(OSError):  # a full disk
            part = self.path / f"{_END}-{secrets.token_hex(4)}"
            part.write_text(json.dumps({"status": status, "ended": time.time()}))
            os.replace(part, self.path / _END)

    def read_end(self) -> tuple[str, float] | None:
        """Return how the run has ended, and when in seconds since the epoch; None where nobody has noted it."""
        try:
            found = json.loads((self.path / _END).read_text())
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
            return is_fresh  # it is just being launched
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

    def find_last_write(self) -> float:
        """Return when the run has written last, in seconds since the epoch."""
        times = [0.0]
        for each in (self.path, *self.path.glob("events-*")):
            with contextlib.suppress(OSError):
                times.append(each.stat().st_mtime)
        return max(times)


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


def make_numbered() -> Folder:
    """Return a new, empty folder of a run on this machine; its name is the next number.

    Raises:
        LaunchError: it cannot be made.
    """
    root = find_state() / "runs"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = max([_read_last(root), *(int(path.name) for path in _list_numbered())])
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


def _read_last(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((root / _LAST).read_text())
    return 0


def _list_numbered() -> Sequence[Path]:
    root = find_state() / "runs"
    found = [path for path in root.glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def list_local() -> list[Folder]:
    """Return the folders of runs that were launched on machines, each as `detach=True`; the oldest first."""
    found: list[Folder] = []
    for path in _list_numbered():
        with contextlib.suppress(LaunchError):  # it is just being removed, or others may write into it
            found.append(Folder(path))
    return found


def describe_status(folder: Folder) -> str:
    """Return how a run on a machine stands, as a word: that of its end, `running` or `lost`."""
    end = folder.read_end()
    return "running" if folder.is_held else "lost" if end is None else end[0]


def find_holders() -> dict[str, str]:
    """Return the runs that hold devices of this machine and outlive their notebooks, by the ids of devices."""
    found: dict[str, str] = {}
    for folder in list_local():
        told = folder.read_metadata()
        if told.get("holds") and folder.is_local and folder.is_held:
            text = (
                f"run {folder.path.name} ({told.get('name')}), see notebook_accel.attach({folder.path.name})"
            )
            found.update(dict.fromkeys(map(str, told["holds"]), text))
    return found


def prune(days: float | None = None) -> list[Folder]:
    """Remove runs that are over, and return them.

    Args:
        days: how long ago they have ended at least; None is as long as such runs are kept. It is a day at least for
            those of other machines, of which nobody knows for certain that they are over.
    """
    if days is None:
        days = _read_days()
    removed: list[Folder] = []
    for folder in list_local():
        end = folder.read_end()
        last = folder.find_last_write() if end is None else end[1]
        least = days if folder.is_local else max(days, 1.0)
        if time.time() - last >= least * _DAY_SECONDS and not folder.is_held:
            folder.remove()
            removed.append(folder)
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
