"""What the command does where required libraries are missing: it names them, and `doctor --fix` installs them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import requirements
from ..diagnosis import packages


def handle(words: Sequence[str]) -> NoReturn:
    """Name all requirements that are missing and end with code 1; `doctor --fix` installs them and starts again.

    None of them is needed for that. Whatever else is installed keeps its version.

    Args:
        words: of the command line.
    """
    missing = requirements.find_missing()
    print(f"Error: {requirements.describe(missing)}", file=sys.stderr)
    if words[:1] == ["doctor"] and "--fix" in words and _repair(missing, yes="--yes" in words):
        sys.stdout.flush()
        sys.exit(subprocess.call([sys.executable, "-m", "notebook_accel", *words]))
    sys.exit(1)


def _repair(missing: Sequence[str], *, yes: bool) -> bool:
    """Install what is missing, if the user wants that; return whether all of it is there now."""
    if importlib.util.find_spec("packaging") is None:
        print("left  libraries: packaging is missing, without which nothing can be planned")
        return False
    from packaging.requirements import Requirement

    wanted = [one for one in map(Requirement, missing) if one.name not in packages.KEPT]
    if len(wanted) < len(missing):
        print(
            "left  libraries: torch is missing, and its build has to fit this machine: see pytorch.org/get-started"
        )
        return False
    try:
        pins = packages.plan(wanted)
        if not pins:
            print("left  libraries: pip says that they are installed, and they cannot be imported")
            return False
        print(f"would  libraries: install {', '.join(pins)}; everything else keeps its version")
        if not (yes or _confirm()):
            return False
        packages.install(pins)
    except packages.PipError as error:
        print(f"libraries: failed, {error}")
        return False
    print(f"libraries: installed {', '.join(pins)}")
    importlib.invalidate_caches()
    return not requirements.find_missing()


def _confirm() -> bool:
    if not sys.stdin.isatty():
        print("not done: there is no terminal to ask in, and --yes was not given")
        return False
    return input("Do it? [y/N]: ").strip().lower() in ("y", "yes")
