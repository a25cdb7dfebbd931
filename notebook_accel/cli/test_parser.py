"""The command `test` for programs that call Accelerate's: a parser of its words, and what runs these."""

from __future__ import annotations

import argparse
from typing import Any

from . import test
from .argument_parser import CONFIG_FILE, add_flag, make_parser


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `test`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    parser = make_parser("test", test_command, "Try out whether launches work on this machine.", subparsers)
    add_flag(parser, "config_file", help=CONFIG_FILE)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Try out launches, and print what works.

    Args:
        args: what a parser of `test_command_parser` read.

    Raises:
        RuntimeError: something does not work.
    """
    if failed := test.run_trials(args.config_file):
        raise RuntimeError(f"{failed} of the tests failed, see above")
