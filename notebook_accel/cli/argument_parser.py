"""Parsers of words for programs that call Accelerate's: of a command by itself, or of one among others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from . import flags

CONFIG_FILE: Final = "A config file [default: the one that launches look for]"


def make_parser(
    name: str, function: Callable[[argparse.Namespace], Any], description: str, subparsers: Any = None
) -> argparse.ArgumentParser:
    """Return a parser without flags.

    Args:
        name: of the command.
        function: what runs the command; namespaces have it as `func` where the command is one of another parser.
        description: for the help.
        subparsers: of another parser, to which the command is added.
    """
    if subparsers is None:
        return argparse.ArgumentParser(f"notebook-accel {name}", description=description, allow_abbrev=False)
    parser: argparse.ArgumentParser = subparsers.add_parser(name, description=description, allow_abbrev=False)
    parser.set_defaults(func=function)
    return parser


def add_flag(parser: argparse.ArgumentParser, name: str, *short: str, **options: Any) -> None:
    """Add a flag in both spellings, `--num_processes` and `--num-processes`; help shows the first one.

    Args:
        parser: gets the flag.
        name: of the flag, with `_`.
        short: spellings with one letter.
        options: for `add_argument`.
    """
    spelled = dict.fromkeys([*short, f"--{name}", f"--{flags.normalize(name)}"])
    action = parser.add_argument(*spelled, **options)
    action.option_strings = [*short, f"--{name}"]
