"""The results of `tests/matrix`: what is kept of a run, and the table that shows it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.matrix import __main__ as matrix
from tests.matrix.environment import NoInterpreterError
from tests.matrix.rows import ROWS, Row
from tests.matrix.table import BEGIN, END, RESULTS, Result, count, load, make_table, put_table, save
from tests.structure.source import ROOT

TRIED = Row(name="tried", python="3.12", torch="2.10.0")
UNTRIED = Row(name="untried", python="3.14", torch=None)
RESULT = Result(
    date="2026-01-31",
    python="3.12.4",
    packages={"torch": "2.10.0+cpu", "ipykernel": "7.4.0", "notebook": "7.6.5"},
    passed=20,
    failed=1,
    skipped=3,
    seconds=5,
)


def test_the_rows_are_a_matrix_for_a_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--list-json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == {"include": [{"row": row.name, "python": row.python} for row in ROWS]}


def test_the_rows_are_listed_without_what_they_need() -> None:
    """The workflow lists them where only the package `packaging` is installed."""
    code = (
        "import sys, packaging.utils\n"
        "sys.path[1:] = [path for path in sys.path[1:] if not path.endswith('-packages')]\n"
        "import runpy\n"
        "sys.argv = ['matrix', '--list-json']\n"
        "runpy.run_module('tests.matrix', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("20 passed in 4.56s", (20, 0, 0)),
        (
            "1 failed, 20 passed, 3 skipped, 2 deselected, 1 xfailed, 9 warnings in 4.56s (0:00:04)",
            (20, 1, 3),
        ),
        ("2 failed, 20 passed, 1 error in 4.56s", (20, 3, 0)),
        ("20 passed, 2 errors in 4.56s", (20, 2, 0)),
    ],
)
def test_the_numbers_are_those_of_the_last_line(line: str, numbers: tuple[int, int, int]) -> None:
    assert tuple(count(line).values()) == numbers
    assert list(count(line)) == ["passed", "failed", "skipped"]


def test_a_result_is_kept_until_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    assert load("tried", folder) is None
    save("tried", RESULT, folder)
    assert load("tried", folder) == RESULT
    assert (folder / "tried.json").read_text(encoding="utf-8").endswith("}\n")


class Here:
    """Stands in for the environment of a row: this Python."""

    python = sys.executable

    def __init__(self, row: Row) -> None:
        self.row = row

    def make(self) -> None:
        if self.row.python == UNTRIED.python:
            raise NoInterpreterError(f"there is no Python {self.row.python}")

    def find_versions(self, names: Collection[str]) -> tuple[str, dict[str, str]]:
        return "3.12.4", {"torch": "2.10.0"}


@pytest.mark.parametrize("words", [None, "passes"])
def test_only_a_whole_run_is_kept(words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_passes(): pass\ndef test_fails(): assert 0\n", encoding="utf-8")
    row = dataclasses.replace(TRIED, tests=(str(tests),))
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    outcome = matrix.run(Here(row), words, tmp_path)
    kept = load("tried", tmp_path)
    if words:
        assert outcome.startswith("1 passed, 1 deselected") and kept is None
    else:
        assert outcome.startswith("1 failed, 1 passed") and kept
        assert (kept.passed, kept.failed, kept.skipped) == (1, 1, 0)
        assert (kept.python, kept.packages) == ("3.12.4", {"torch": "2.10.0"})


def test_environments_are_made_where_their_python_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "Environment", Here)
    monkeypatch.setattr(matrix, "IMPORT_ALL", ("-c", ""))
    monkeypatch.setattr(matrix, "ROWS", (TRIED, UNTRIED))
    assert matrix.main(["--make"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "== tried: Python 3.12, torch 2.10.0",
        "== tried: made",
        "== untried: Python 3.14, torch of today",
        "== untried: skipped: there is no Python 3.14",
    ]
    monkeypatch.setattr(matrix, "IMPORT_ALL", ("-c", "raise SystemExit(1)"))
    assert matrix.main(["--make"]) == 1
    assert "== tried: error: Command" in capsys.readouterr().out


def test_the_table_has_a_line_for_each_row(tmp_path: Path) -> None:
    save("tried", RESULT, tmp_path)
    head, rule, tried, untried = make_table([TRIED, UNTRIED], tmp_path).splitlines()
    assert head.startswith("| environment | Python | torch |") and set(rule) <= set("|- ")
    assert (
        tried == "| tried | 3.12.4 | 2.10.0+cpu | ipykernel 7.4.0, notebook 7.6.5 | 20 | 1 | 3 | 2026-01-31 |"
    )
    assert untried == "| untried | 3.14 | newest |  |  |  |  | not run yet |"


def test_the_table_is_written_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    assert matrix.main(["--table", str(page)]) == 0
    written = page.read_text(encoding="utf-8")
    assert written == f"before\n\n{BEGIN}\n\n{make_table(ROWS)}\n\n{END}\n\nafter\n"
    assert put_table(written, make_table(ROWS)) == written


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}\n"])
def test_a_page_without_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the page needs the lines"):
        put_table(text, "table")


def test_the_page_has_the_results() -> None:
    text = (ROOT / "docs" / "tested.md").read_text(encoding="utf-8")
    assert put_table(text, make_table(ROWS)) == text, "run: python -m tests.matrix --table docs/tested.md"


def test_each_result_is_that_of_a_row() -> None:
    assert {path.stem for path in RESULTS.glob("*")} <= {row.name for row in ROWS}
