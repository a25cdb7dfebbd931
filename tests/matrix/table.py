"""What the last whole run of each row came to: kept as a file a row, and shown as a table in a page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .rows import Row

RESULTS: Final = Path(__file__).parent / "results"
SHOWN: Final = ("ipykernel", "ipython", "ipywidgets", "notebook")
"""Packages that the table names: those that notebooks are shown by."""
BEGIN: Final = "<!-- table of tests.matrix -->"
END: Final = "<!-- end of table -->"
_COUNT: Final = re.compile(r"(\d+) (passed|failed|skipped|error)")
_HEAD: Final = (
    "environment",
    "Python",
    "torch",
    "notebook packages",
    "passed",
    "failed",
    "skipped",
    "last run",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came out where a row ran whole.

    Attributes:
        date: of the run, such as `2026-01-31`.
        python: the version.
        packages: versions by the names of packages, torch among them.
        passed: number of tests.
        failed: number of tests, with those whose fixtures failed.
        skipped: number of tests.
        seconds: that the tests took.
    """

    date: str
    python: str
    packages: Mapping[str, str]
    passed: int
    failed: int
    skipped: int
    seconds: int


def count(line: str) -> dict[str, int]:
    """Return the numbers of tests that passed, failed and were skipped.

    Args:
        line: the last one of pytest, such as `1 failed, 20 passed, 3 skipped in 4.56s`.
    """
    found = {word: int(number) for number, word in _COUNT.findall(line)}
    return {
        "passed": found.get("passed", 0),
        "failed": found.get("failed", 0) + found.get("error", 0),
        "skipped": found.get("skipped", 0),
    }


def save(name: str, result: Result, folder: Path = RESULTS) -> None:
    """Write the result of a row in place of an older one.

    Args:
        name: of the row.
        result: of its run.
        folder: of all results.
    """
    folder.mkdir(exist_ok=True)
    text = json.dumps(asdict(result), indent=2, sort_keys=True)
    (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def load(name: str, folder: Path = RESULTS) -> Result | None:
    """Return the result of a row, or None where it never ran whole.

    Args:
        name: of the row.
        folder: of all results.
    """
    path = folder / f"{name}.json"
    return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def make_table(rows: Sequence[Row], folder: Path = RESULTS) -> str:
    """Return a table in Markdown with a line for each row.

    Args:
        rows: the environments.
        folder: of all results.
    """
    lines = [_HEAD, ("---",) * len(_HEAD), *(_make_line(row, load(row.name, folder)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _make_line(row: Row, result: Result | None) -> tuple[str, ...]:
    if result is None:
        return (row.name, row.python, row.torch or "newest", "", "", "", "", "not run yet")
    shown = ", ".join(f"{name} {result.packages[name]}" for name in SHOWN if name in result.packages)
    numbers = (str(result.passed), str(result.failed), str(result.skipped))
    return (row.name, result.python, result.packages.get("torch", ""), shown, *numbers, result.date)


def put_table(text: str, table: str) -> str:
    """Return the text of a page with the table in place of what was between the markers.

    Args:
        text: of the page.
        table: in Markdown.

    Raises:
        ValueError: the page lacks a marker, or the second one comes first.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, in this order")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
