"""Small disks and control groups for programs of tests; a test is skipped where the system gives none."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_GROUPS = Path("/sys/fs/cgroup")


def small_disk(folder: Path | str, options: str) -> list[str]:
    """Return the words before a command that let it, and it alone, find a small disk at a folder.

    Args:
        folder: which is there.
        options: of tmpfs, such as `size=64k`.
    """
    mount = ["sh", "-c", f'mount -t tmpfs -o {options} none "$0" && exec "$@"', str(folder)]
    return [*require_own_mounts(), *mount]


def require_own_mounts() -> list[str]:
    """Return the words before a command that let it mount for itself alone; skip the test where nobody may."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    trial = [*alone, "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
    if subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("needs a system that lets a process mount a disk for itself")
    return alone


@contextlib.contextmanager
def control_group(controller: str, limits: dict[str, int]) -> Iterator[list[str]]:
    """Make a control group with limits; it ends with the block, and all its processes with it.

    Args:
        controller: `memory` or `pids`.
        limits: by the file of version 2 that they are written to, such as `memory.max`.

    Yields:
        The words before a command that put it into the group.
    """
    try:
        group = _make_group(controller)
    except FileExistsError:
        raise
    except OSError as error:
        pytest.skip(f"needs a control group for {controller}, which cannot be made here: {error}")
    try:
        for name, limit in limits.items():
            older = {"memory.max": "memory.limit_in_bytes"}.get(name, name)
            (group / name if (group / name).exists() else group / older).write_text(str(limit))
        yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
    finally:
        _remove_group(group)


def _make_group(controller: str) -> Path:
    """Return a new group below that of this process."""
    if sys.platform != "linux":
        raise OSError("only Linux has them")
    places = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    versions = {name: path for _, names, path in places for name in names.split(",")}
    if controller in versions:
        parent = _GROUPS / controller / versions[controller].lstrip("/")
    else:
        parent = _GROUPS / versions[""].lstrip("/")
        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    group = parent / f"notebook-accel-test-{os.getpid()}"
    group.mkdir()
    return group


def _remove_group(group: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        try:
            group.rmdir()
            return
        except OSError:  # what was killed ends after a moment
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
