"""Installed packages that do not fit this one or torch, and how pip mends them without replacing anything else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .. import probes

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION: Final = "notebook-accel"
KEPT: Final = ("torch", "torch-xla")
"""Never installed by a repair: all that is compiled for a torch would no longer fit."""
_PEFT: Final = re.compile(r"TORCHAO_MINIMUM_VERSION\D*([\d.]+)")
_TRIES: Final = 5
_SECONDS: Final = 600.0


class PipError(Exception):
    """Pip refused; the text is its last line."""


def find_due() -> list[Requirement]:
    """Return what this package needs on this machine.

    Raises:
        importlib.metadata.PackageNotFoundError: this package is not installed, but on the path only.
    """
    from packaging.requirements import Requirement

    needed = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    return [part for part in needed if part.marker is None or part.marker.evaluate({"extra": ""})]


def find_unmet(due: Iterable[Requirement]) -> list[tuple[Requirement, str]]:
    """Return the requirements that are not met, each with the installed version or `missing`."""
    found = []
    for requirement in due:
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        if installed == "missing" or not requirement.specifier.contains(installed, prereleases=True):
            found.append((requirement, installed))
    return found


def find_torchao_problem(path: str | None = None) -> str:
    """Return why torchao does not work here, empty where it does or is not installed.

    It is imported in a process of its own: nothing of this process changes.

    Args:
        path: a folder with another torchao, which is tried instead.
    """
    version = probes.version("torchao") if path is None else _version_in(path)
    if version is None:
        return ""
    if reason := _try_import("torchao.float8", path):
        return f"torchao {version} cannot be imported beside torch {probes.version('torch')} ({reason})"
    least = _least_torchao_of_peft()
    if least and _is_older(version, least):
        return f"PEFT {probes.version('peft')} refuses torchao {version}: it asks for {least}"
    return ""


def find_torch_xla_problem() -> str:
    """Return why torch_xla cannot be imported here, empty where it can or is not installed.

    It is imported in a process of its own, which has none of the TPU's chips: an import does not start the runtime.
    """
    version = probes.version("torch_xla")
    if version is None or not (reason := _try_import("torch_xla")):
        return ""
    return f"torch_xla {version} cannot be imported beside torch {probes.version('torch')} ({reason})"


def _try_import(module: str, path: str | None = None) -> str:
    """Import a module in a process of its own; return the last line of its error, empty where it has none.

    Args:
        module: its name.
        path: a folder where it is looked for first.
    """
    code = f"import sys; sys.path[:0] = {[path] if path else []}; import {module}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the import did not end within {_SECONDS:.0f} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _least_torchao_of_peft() -> str:
    """Return the oldest torchao that the installed PEFT works with; its requirements do not name it."""
    spec = importlib.util.find_spec("peft")  # imports nothing
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("import_utils.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = _PEFT.search(text)
    return found[1].rstrip(".") if found else ""


def _is_older(version: str, least: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return False


def find_fitting_torchao(folder: str) -> str:
    """Return the newest torchao that works here, empty where none of the last few does.

    Args:
        folder: where each is put to be tried.

    Raises:
        PipError: pip gets none.
    """
    wanted = "torchao"
    for number in range(_TRIES):
        target = Path(folder, str(number))
        _pip("install", "--no-deps", "--target", str(target), wanted)
        version = _version_in(str(target))
        if version is None or not find_torchao_problem(str(target)):
            return version or ""
        wanted = f"torchao<{version}"
    return ""


def _version_in(folder: str) -> str | None:
    found = importlib.metadata.distributions(path=[folder], name="torchao")
    return next((one.version for one in found), None)


def plan(wanted: Sequence[Requirement]) -> list[str]:
    """Return what pip would install for requirements, as `name==version`.

    Whatever else is installed keeps its version.

    Raises:
        PipError: that is impossible, or pip reaches no index.
    """
    from packaging.utils import canonicalize_name

    free = {canonicalize_name(one.name) for one in wanted}
    pins = {
        f"{one.name}=={one.version}"
        for one in importlib.metadata.distributions()
        if one.name and canonicalize_name(one.name) not in free
    }
    with tempfile.TemporaryDirectory() as folder:
        limits, report = Path(folder, "limits.txt"), Path(folder, "report.json")
        limits.write_text("\n".join(sorted(pins)), encoding="utf-8")
        words = ("--dry-run", "--constraint", str(limits), "--report", str(report), *map(str, wanted))
        _pip("install", *words)
        planned = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [f"{one['metadata']['name']}=={one['metadata']['version']}" for one in planned]


def install(pins: Sequence[str]) -> None:
    """Install exactly these.

    Args:
        pins: as `plan` returns them.

    Raises:
        PipError: pip failed.
    """
    _pip("install", "--no-deps", *pins)


def _pip(command: str, *words: str) -> None:
    if not probes.is_available("pip"):
        uv = f"; `uv pip install --python {sys.executable}` installs" if shutil.which("uv") else ""
        raise PipError(f"this Python has no pip{uv}")
    run = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        command,
        "--quiet",
        *words,
    ]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PipError(f"pip did not end within {_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise PipError(lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}")
