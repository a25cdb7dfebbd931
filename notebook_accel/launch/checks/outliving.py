"""What ends all processes of a notebook's machine, login or container, a run that should outlive the notebook too."""

from __future__ import annotations

import contextlib
import getpass
from pathlib import Path
from typing import Final

from ... import environ

_CGROUP: Final = Path("/proc/self/cgroup")
_CONTAINER_FILES: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
_LOGIND: Final = (Path("/etc/systemd/logind.conf"), Path("/etc/systemd/logind.conf.d"))
_LINGER: Final = Path("/var/lib/systemd/linger")
_HOSTED: Final = {"COLAB_RELEASE_TAG": "Colab's machine", "KAGGLE_KERNEL_RUN_TYPE": "Kaggle's session"}
_UNIT: Final = ".service"


def describe_killer() -> str:
    """Return a sentence about what ends runs that outlive this process; empty where nothing is known of that kind."""
    what = _find_end()
    return f"It ends with {what}." if what else ""


def _find_end() -> str:
    for variable, machine in _HOSTED.items():
        if environ.get(variable):
            return machine
    if job_id := environ.get("SLURM_JOB_ID"):
        return f"job {job_id} of SLURM, which this notebook runs in"
    if environ.get("KUBERNETES_SERVICE_HOST") or any(path.exists() for path in _CONTAINER_FILES):
        return "this container"
    groups = _read(_CGROUP).splitlines()
    path = next(
        (line.rpartition(":")[2] for line in groups if "systemd" in line or line.startswith("0::")), ""
    )
    if path.startswith("/user.slice") and "/session-" in path and _kills_processes():
        return "the last login of this user (KillUserProcesses=yes), unless you say `loginctl enable-linger`"
    unit = next((part for part in path.split("/") if part.endswith(_UNIT)), "")
    if unit and not path.startswith("/user.slice"):  # such as a spawner of JupyterHub makes
        return f"the service {unit}, which this notebook runs in"
    return ""


def _kills_processes() -> bool:
    files = [_LOGIND[0], *sorted(_LOGIND[1].glob("*.conf"))]
    words = [line.strip().lower() for file in files for line in _read(file).splitlines()]
    said = [word.partition("=")[2].strip() for word in words if word.startswith("killuserprocesses")]
    kills = bool(said) and said[-1] in ("yes", "true", "1", "on")
    return kills and not (_LINGER / getpass.getuser()).exists()


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace")
    return ""
