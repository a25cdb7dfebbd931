"""Tests for the parser and the function of `test` that programs call."""

from __future__ import annotations

import pytest
from accelerate.commands import test as reference

from notebook_accel.cli import test, test_parser


@pytest.mark.parametrize("words", [[], ["--config_file", "a.yaml"]])
def test_words_are_read_as_accelerates_parser_reads_them(words: list[str]) -> None:
    theirs = vars(reference.test_command_parser().parse_args(words))
    assert vars(test_parser.test_command_parser().parse_args(words)) == theirs


def test_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(machine: test.Machine) -> str:
        raise OSError("no such place")

    args = test_parser.test_command_parser().parse_args([])
    monkeypatch.setattr(test, "_TRIALS", (("one", lambda machine: "fine"), ("two", fail)))
    with pytest.raises(RuntimeError, match="1 of the tests failed"):
        test_parser.test_command(args)
    printed = capsys.readouterr().out
    assert "one: fine" in printed and "two: OSError: no such place" in printed
    monkeypatch.setattr(test, "_TRIALS", (("one", lambda machine: "fine"),))
    test_parser.test_command(args)
