"""Processes that import libraries once, and fork the processes of each job: with Accelerate, and with the take-over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from notebook_accel.takeover import finder

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("ours", "theirs")
SECONDS = 400.0
END_SECONDS = 20.0
SHOWN = 8000  # characters of output in an error


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes of a job do."""

    function: str
    """`module:name`"""
    arguments: Sequence[str] = ()
    number: int = 1
    """of processes; two or more have the variables of torch's launchers"""
    folder: str
    """where they run; their output goes to `output.txt` there"""
    variables: Mapping[str, str] = field(default_factory=dict)
    libraries: Sequence[str] = ()
    """what the host imports before it forks: `module`, or `module:name` for what a module imports on demand"""
    seconds: float = SECONDS
    """after which the processes are killed"""


class Host:
    """A process for one side, which starts with the first job, and anew with the first after one that failed.

    Args:
        side: one of `SIDES`.
        folder: for its log and caches.
        left_out: modules that it cannot import.
    """

    def __init__(self, side: str, folder: Path, left_out: Sequence[str] = ()) -> None:
        self.side = side
        self.folder = folder
        self.left_out = left_out
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process; None if none runs."""
        return None if self._process is None else self._process.pid

    def run(self, job: Job) -> None:
        """Run a job to its end.

        Raises:
            AssertionError: it failed; the text has the output.
        """
        with self._lock:
            answer = self._ask(job)
            if answer.get("codes") == [0] * job.number:
                return
            self.close()
        output = Path(job.folder, "output.txt")
        text = output.read_text() if output.exists() else ""
        raise AssertionError(f"{job.function} on the host for {self.side!r}: {answer}\n{text[-SHOWN:]}")

    def close(self) -> None:
        """End the process with all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session: processes of jobs, if it was killed
        process.wait()
        process.stdout.close()

    def _ask(self, job: Job) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        return {"error": f"the host has ended: {self._log.read_text()[-SHOWN:]}"}

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.side}.log"

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.libraries.hosting", self.side, *self.left_out],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=make_environment(self.folder, self.side),
                start_new_session=True,
            )
        return self._process


def make_environment(folder: Path, side: str | None = None) -> dict[str, str]:
    """Return the variables of a program.

    Args:
        folder: for caches.
        side: "ours" if `accelerate` shall be ours from the start.
    """
    unset = ("ACCELERATE_", "NOTEBOOK_ACCEL_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(unset)}
    variables = {
        **kept,
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a host has one thread
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return {**variables, **(finder.list_variables(variables) if side == "ours" else {})}


@contextlib.contextmanager
def open_hosts(folder: Path, left_out: Sequence[str] = ()) -> Iterator[dict[str, Host]]:
    """Yield a host for each side, and end them.

    Args:
        folder: see `Host`.
        left_out: see `Host`.
    """
    hosts = {side: Host(side, folder, left_out) for side in SIDES}
    try:
        yield hosts
    finally:
        for host in hosts.values():
            host.close()
