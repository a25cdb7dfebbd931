"""Tries the package in other environments, one after the other: `python -m tests.matrix [--only NAME] [-k WORDS]`.

Each environment is made on first use and kept. The output of pytest is in `build/matrix`. What a whole row came to is
in `tests/matrix/results`, a file a row; `--table docs/tested.md` writes these into the table of that page.
`--make` makes environments only, `--list-json` prints the rows for a program. All this needs the package `packaging`
alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .environment import ROOT, Environment, NoInterpreterError
from .rows import ROWS
from .table import RESULTS, SHOWN, Result, count, make_table, put_table, save

IMPORT_ALL: Final = ("-m", "tests.matrix.imports")
LOGS: Final = ROOT / "build" / "matrix"
_APART: Final = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"')


def list_json() -> str:
    """Return name and Python of each row, as the matrix of a GitHub workflow takes them."""
    return json.dumps({"include": [{"row": row.name, "python": row.python} for row in ROWS]})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, or say what they are or came to; return 1 where one has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument(
        "--only", action="append", choices=[row.name for row in ROWS], help="a row; can be repeated"
    )
    parser.add_argument("-k", dest="words", help="for pytest: tests by their names")
    parser.add_argument(
        "--list-json", action="store_true", help="print names and Pythons of the rows, run none"
    )
    parser.add_argument(
        "--table", type=Path, metavar="PAGE", help="write the results into the table of a page, run none"
    )
    parser.add_argument("--make", action="store_true", help="make the environments, run nothing in them")
    options = parser.parse_args(arguments)
    if options.list_json:
        print(list_json())
        return 0
    if options.table:
        text = options.table.read_text(encoding="utf-8")
        options.table.write_text(put_table(text, make_table(ROWS)), encoding="utf-8")
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for row in ROWS:
        if not options.only or row.name in options.only:
            environment = Environment(row)
            outcome = make(environment)
            if not outcome:
                outcome = "made" if options.make else run(environment, options.words)
            print(f"== {row.name}: {outcome}", flush=True)
            outcomes.append(outcome)
    return int(any("failed" in outcome or "error" in outcome for outcome in outcomes))


def make(environment: Environment) -> str:
    """Make the environment of a row, and import all modules there; return why that cannot be, else nothing."""
    row = environment.row
    print(f"== {row.name}: Python {row.python}, torch {row.torch or 'of today'}", flush=True)
    try:
        environment.make()
        subprocess.run([str(environment.python), *IMPORT_ALL], cwd=ROOT, check=True)
    except NoInterpreterError as error:
        return f"skipped: {error}"
    except (subprocess.CalledProcessError, AssertionError) as error:
        return f"error: {error}"
    return ""


def run(environment: Environment, words: str | None, folder: Path = RESULTS) -> str:
    """Run the tests of a row.

    Args:
        environment: of the row; it is made.
        words: for pytest's option `-k`; the result of such a part is not kept.
        folder: of all results.

    Returns:
        pytest's last line, or why there is none.
    """
    row = environment.row
    started = time.monotonic()
    apart = _APART if subprocess.run([*_APART, "true"], capture_output=True).returncode == 0 else ()
    command = [
        *apart,
        str(environment.python),
        "-m",
        "pytest",
        *row.tests,
        "--durations=10",
        *(["-k", words] if words else []),
    ]
    log = LOGS / f"{row.name}.log"
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=ROOT, env=own, stdout=file, stderr=subprocess.STDOUT)
    last = log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2].strip("= ")
    if not re.search(r"\d+ (passed|failed|error)", last):
        return f"error: {last}"
    if not words and done.returncode in (0, 1):  # else it was interrupted
        seconds = round(time.monotonic() - started)
        save(row.name, make_result(environment, last, seconds), folder)
    return last


def make_result(environment: Environment, line: str, seconds: int) -> Result:
    """Return what is kept of a run.

    Args:
        environment: where the tests ran.
        line: the last one of pytest.
        seconds: that the tests took.
    """
    python, packages = environment.find_versions(("torch", *SHOWN))
    today = datetime.date.today().isoformat()
    return Result(date=today, python=python, packages=packages, seconds=seconds, **count(line))


if __name__ == "__main__":
    sys.exit(main())
