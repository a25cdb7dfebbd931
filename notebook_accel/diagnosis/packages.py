"""Installed packages that do not fit this one or torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .. import probes

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION: Final = "notebook-accel"
_PEFT: Final = re.compile(r"TORCHAO_MINIMUM_VERSION\D*([\d.]+)")
_SECONDS: Final = 600.0


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


def find_torchao_problem() -> str:
    """Return why torchao does not work here, empty where it does or is not installed.

    It is imported in a process of its own: nothing of this process changes.
    """
    version = probes.version("torchao")
    if version is None:
        return ""
    if reason := _try_import("torchao.float8"):
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


def _try_import(module: str) -> str:
    """Import a module in a process of its own; return the last line of its error, empty where it has none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
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
