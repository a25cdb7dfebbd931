"""Programs that tests start: the words of a launch, what a program prints, and whether it fails."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from .. import environ
from .testing import device_count, get_launch_command

DEFAULT_LAUNCH_COMMAND: Final = get_launch_command(num_processes=device_count, monitor_interval=0.1)
"""The words of a launch on all devices; lists that are made of it are copies."""
_FIRST_PORT: Final = 29500
_Word = str | os.PathLike[str]


class SubprocessCallException(Exception):
    """A program failed; the message has its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutput:
    """How a program ended.

    Attributes:
        returncode: its exit code.
        stdout: lines that it printed.
        stderr: lines on its error stream.
    """

    returncode: int
    stdout: list[str]
    stderr: list[str]


def run_command(
    command: Sequence[_Word], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a program to its end.

    Args:
        command: its words.
        return_stdout: return what it printed, the error stream included.
        env: all of its environment variables; by default those of this process.

    Returns:
        What it printed, None where that is not asked for.

    Raises:
        SubprocessCallException: its exit code is not 0.
    """
    words = [os.fspath(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, check=False, text=True
    )
    if done.returncode:
        text = f"{' '.join(words)} ended with exit code {done.returncode}:\n\n{done.stdout}"
        raise SubprocessCallException(text)
    return done.stdout if return_stdout else None


def execute_subprocess_async(
    cmd: Sequence[_Word],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> ProgramOutput:
    """Run a program to its end, and show its lines as they come.

    Args:
        cmd: its words.
        env: all of its environment variables; by default those of this process.
        stdin: its input, as `subprocess.Popen` takes it.
        timeout: has no effect, also in Accelerate: a program that needs longer is not ended.
        quiet: show no lines.
        echo: print the words first.

    Raises:
        RuntimeError: its exit code is not 0.
    """
    words = [os.fspath(word) for word in cmd]
    if echo:
        print(f"\nRunning: {' '.join(words)}")
    lines: tuple[list[str], list[str]] = ([], [])
    with subprocess.Popen(
        words,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as program:
        shown = (None, None) if quiet else (sys.stdout, sys.stderr)
        readers = [
            threading.Thread(target=_read, args=row)
            for row in zip(
                (program.stdout, program.stderr), lines, shown, ("stdout:", "stderr:"), strict=True
            )
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    if program.returncode:
        text = "\n".join(lines[1])
        raise RuntimeError(f"{' '.join(words)} ended with exit code {program.returncode}:\n\n{text}")
    return ProgramOutput(returncode=program.returncode, stdout=lines[0], stderr=lines[1])


def _read(source: IO[str], lines: list[str], shown: IO[str] | None, label: str) -> None:
    for line in source:
        lines.append(line.rstrip())
        if shown is not None:
            print(label, lines[-1], file=shown)


def pytest_xdist_worker_id() -> int:
    """Return the number of this worker of pytest-xdist, 0 without it."""
    return int(environ.snapshot().get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port for ranks to meet, another one in each worker of pytest-xdist."""
    return _FIRST_PORT + pytest_xdist_worker_id()


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path in the package of Accelerate that is installed, in this one where it is not.

    Args:
        components: the parts of the path.
    """
    spec = importlib.machinery.PathFinder.find_spec("accelerate")
    origin = spec.origin if spec is not None and spec.origin else str(Path(__file__).parent)
    return Path(origin).parent.joinpath(*components)
