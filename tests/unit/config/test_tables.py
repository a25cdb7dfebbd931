"""The table in docs/options.md says what the table of options says."""

from __future__ import annotations

import pytest

from notebook_accel.config import arguments, tables
from tests.structure.source import ROOT


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert tables.write_into(text) == text, "run: python -m notebook_accel.config.tables docs/options.md"


def test_every_argument_has_a_line() -> None:
    lines = tables.as_markdown().splitlines()
    assert all(any(line.startswith(f"| `{name}` |") for line in lines) for name in arguments.options())


def test_a_text_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has no <!-- options"):
        tables.write_into("text")
    with pytest.raises(ValueError, match="the text has no <!-- end of options -->"):
        tables.write_into(tables.BEGIN)
