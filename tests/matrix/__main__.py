"""Tries the package in other environments, one after the other: `python -m tests.matrix [--only NAME] [-k WORDS]`.

Each environment is made on first use and kept. What came out is in `build/matrix`, a file a row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from typing import Final

from .environment import ROOT, Environment, NoInterpreterError
from .rows import ROWS, Row

RESULTS: Final = ROOT / "build" / "matrix"
_APART: Final = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"')
_IMPORT_ALL: Final = """
import importlib
from tests.structure.source import modules
for module in modules():
    if not module.name.endswith(("__main__", "sitecustomize")):
        importlib.import_module(module.name)
"""


def main() -> int:
    """Run the rows; return 1 where one has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument(
        "--only", action="append", choices=[row.name for row in ROWS], help="a row; can be repeated"
    )
    parser.add_argument("-k", dest="words", help="for pytest: tests by their names")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for row in ROWS:
        if not options.only or row.name in options.only:
            outcomes[row.name] = run(row, options.words)
            print(f"== {row.name}: {outcomes[row.name]}", flush=True)
    return int(any("failed" in outcome or "error" in outcome for outcome in outcomes.values()))


def run(row: Row, words: str | None) -> str:
    """Make the environment of a row, and run its tests there.

    Args:
        row: says which.
        words: for pytest's option `-k`.

    Returns:
        pytest's last line, or why there is none.
    """
    environment = Environment(row)
    print(f"== {row.name}: Python {row.python}, torch {row.torch or 'of today'}", flush=True)
    python = str(environment.python)
    try:
        environment.make()
        subprocess.run([python, "-c", _IMPORT_ALL], cwd=ROOT, check=True)
    except NoInterpreterError as error:
        return f"skipped: {error}"
    except (subprocess.CalledProcessError, AssertionError) as error:
        return f"error: {error}"
    started = time.monotonic()
    apart = _APART if subprocess.run([*_APART, "true"], capture_output=True).returncode == 0 else ()
    command = [
        *apart,
        python,
        "-m",
        "pytest",
        *row.tests,
        "--durations=10",
        *(["-k", words] if words else []),
    ]
    log = RESULTS / f"{row.name}.log"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with log.open("w", encoding="utf-8") as file:
        subprocess.run(command, cwd=ROOT, env=own, stdout=file, stderr=subprocess.STDOUT)
    last = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2].strip("= ")
    outcome = last if re.search(r"\d+ (passed|failed|error)", last) else f"error: {last}"
    result = {"row": row.name, "outcome": outcome, "seconds": round(time.monotonic() - started)}
    (RESULTS / f"{row.name}.json").write_text(json.dumps(result), encoding="utf-8")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
