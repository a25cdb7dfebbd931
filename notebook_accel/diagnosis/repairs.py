"""What `doctor --fix` can repair without harm: each repair says what it would do before it does it."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .. import probes
from ..launch import leftovers
from . import packages

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from .check import Check


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """Something that can be done.

    Attributes:
        name: of the check that it is for.
        text: what it does, beginning with a verb.
        apply: does it, and returns what was done. Raises PipError or OSError where that fails.
    """

    name: str
    text: str
    apply: Callable[[], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """A finding that is left as it is.

    Attributes:
        name: of the check.
        text: why nothing is done.
    """

    name: str
    text: str


def find(checks: Iterable[Check]) -> list[Repair | Left]:
    """Return what can be repaired, and why the rest is left.

    Args:
        checks: the results of all checks.
    """
    wrong = [check for check in checks if check.status != "ok"]
    found: list[Repair | Left] = []
    for name in dict.fromkeys(check.name for check in wrong):
        find_of = _FINDERS.get(name)
        if find_of is not None:
            found += find_of(name)
        else:
            found += [Left(name=name, text=check.remedy) for check in wrong if check.name == name]
    return found


def describe(one: Repair | Left) -> str:
    """Return a finding as a line."""
    return f"{'would' if isinstance(one, Repair) else 'left'}  {one.name}: {one.text}"


def apply(repair: Repair) -> str:
    """Do what a repair says, and return a sentence about it, also where it failed."""
    try:
        return f"{repair.name}: {repair.apply()}"
    except (packages.PipError, OSError) as error:
        return f"{repair.name}: failed, {error}"


def _libraries(name: str) -> list[Repair | Left]:
    try:
        unmet = packages.find_unmet(packages.find_due())
    except importlib.metadata.PackageNotFoundError:
        return [Left(name=name, text="pip install notebook-accel: what it needs is not known here")]
    found: list[Repair | Left] = []
    for requirement, installed in unmet:
        if requirement.name in packages.KEPT:
            found.append(Left(name=name, text=f"{requirement.name} {installed} {_WHY_KEPT}"))
        else:
            found.append(_plan_install(name, requirement, installed))
    return found


def _plan_install(name: str, requirement: Requirement, installed: str) -> Repair | Left:
    try:
        pins = packages.plan([requirement])
    except packages.PipError as error:
        return Left(name=name, text=f"{requirement} cannot be installed beside what is there: {error}")
    instead = "" if installed == "missing" else f" in place of {requirement.name} {installed}"
    text = f"install {', '.join(pins)}{instead}; everything else keeps its version"
    return Repair(name=name, text=text, apply=functools.partial(_install, pins))


def _install(pins: list[str]) -> str:
    packages.install(pins)
    names = [pin.partition("==")[0] for pin in pins]
    return f"installed {', '.join(pins)}{_hint_at_old_modules(names)}"


def _hint_at_old_modules(names: Iterable[str]) -> str:
    loaded = sorted(name for name in names if name.replace("-", "_") in sys.modules)
    return f"; this kernel has imported {', '.join(loaded)} already: restart it" if loaded else ""


def _torchao(name: str) -> list[Repair | Left]:
    fitting = f"the newest torchao that works beside torch {probes.version('torch')}"
    text = f"install {fitting}, in place of torchao {probes.version('torchao')}"
    return [Repair(name=name, text=f"{text}; everything else keeps its version", apply=_replace_torchao)]


def _replace_torchao() -> str:
    with tempfile.TemporaryDirectory() as folder:
        version = packages.find_fitting_torchao(folder)
    if not version:
        return "none of the newest torchao works here, so that nothing was changed"
    return _install([f"torchao=={version}"])


def _torch_xla(name: str) -> list[Repair | Left]:
    return [Left(name=name, text=f"torch and torch_xla are {_WHY_KEPT}")]


def _leftovers(name: str) -> list[Repair | Left]:
    return [
        Repair(
            name=name,
            text=f"remove {path} ({text})",
            apply=functools.partial(_remove, path),
        )
        for path, text in leftovers.find().items()
    ]


def _remove(path: Path) -> str:
    leftovers.remove(path)
    return f"removed {path}"


_WHY_KEPT: Final = (
    "left as they are: what else is installed is built for that torch, and a running kernel has it loaded. "
    "Do it yourself, in an environment or kernel that is new"
)
_FINDERS: Final[dict[str, Callable[[str], list[Repair | Left]]]] = {
    "libraries": _libraries,
    "torchao": _torchao,
    "torch_xla": _torch_xla,
    "leftovers": _leftovers,
}
