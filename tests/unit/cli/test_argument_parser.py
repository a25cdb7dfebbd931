"""Tests for the parsers that programs get: both spellings of a flag, and commands of another parser."""

from __future__ import annotations

import argparse

import pytest

from notebook_accel.cli.argument_parser import add_flag, make_parser


def run(args: argparse.Namespace) -> None: ...


def test_a_flag_has_both_spellings_and_help_shows_one() -> None:
    parser = make_parser("try", run, "Try.")
    add_flag(parser, "num_words", "-n", type=int, required=True, help="Words.")
    for word in ("--num_words", "--num-words", "-n"):
        assert vars(parser.parse_args([word, "3"])) == {"num_words": 3}
    shown = parser.format_help()
    assert "--num_words" in shown and "-n NUM_WORDS" in shown and "--num-words" not in shown


def test_a_command_of_another_parser_says_what_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flag(make_parser("try", run, "Try.", parser.add_subparsers()), "debug", action="store_true")
    found = parser.parse_args(["try", "--debug"])
    assert (found.func, found.debug) == (run, True)
    with pytest.raises(SystemExit):
        parser.parse_args(["try", "--deb"])
    assert "--deb" in capsys.readouterr().err
