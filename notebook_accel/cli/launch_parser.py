"""The command `launch` for programs that call Accelerate's: a parser of its words, and a function that runs these."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import rich_click as click

from .. import environ
from ..config.option import Option, as_text
from ..launch.script import Script
from . import flags
from .launch import launch, run

_SWITCHES: Final = ("dry_run", *flags.PARADIGMS)
"""Flags without a value that are no options of a config."""
_DESTINATIONS: Final = {"tpu_cluster": "tpu_use_cluster"}
"""Names in the namespace that differ from the flag's."""
_TEXTS: Final = ("fsdp_", "zero3_")
"""How flags begin whose values Accelerate's namespace has as they were typed, such as `true`."""


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `launch`; all words after the script are the script's own.

    Args:
        subparsers: of another parser, to which the command is added; its namespace has `launch_command` as `func`.
    """
    options: dict[str, Any] = {"description": str(launch.help).partition("\n")[0], "allow_abbrev": False}
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser("notebook-accel launch", **options)
    else:
        parser = subparsers.add_parser("launch", **options)
        parser.set_defaults(func=launch_command)
    read = parser.parse_known_args
    parser.parse_known_args = functools.partial(_read_words, read)  # type: ignore[method-assign]
    parser.add_argument("--config-file", "--config_file", help="Config file to use.")
    parser.add_argument("-q", "--quiet", action="store_true", help="Say nothing but what the script says.")
    parser.add_argument("-m", "--module", action="store_true", help="Run a module, as python -m does.")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="Run a program without Python."
    )
    for name in _SWITCHES:
        parser.add_argument(*_spell(name), dest=name, action="store_true")
    for option in flags.options():
        _add_flag(parser, option)
    parser.add_argument(
        *_spell("no_tpu_cluster"), dest="tpu_use_cluster", action="store_false", help="No cluster."
    )
    for name in ("aws_access_key_id", "aws_secret_access_key"):
        parser.add_argument(*_spell(name), help=argparse.SUPPRESS)  # for Amazon SageMaker
    parser.set_defaults(tpu_use_cluster=None)
    parser.add_argument("training_script", help="The script, module or program to run.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its own words.")
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run what the words of the command `launch` say, and return when it has ended.

    Args:
        args: what a parser of `launch_command_parser` read, changed or not.

    Raises:
        ConfigError: lists everything that is wrong.
        click.UsageError: `module` together with `no_python`, or words that a notebook does not take.
        subprocess.CalledProcessError: it ended with another exit code than 0.
        SystemExit: the same, with `quiet`.
    """
    if args.module and args.no_python:
        raise click.UsageError("--module and --no_python exclude each other")
    kind: Any = "module" if args.module else "program" if args.no_python else "script"
    script = Script(kind=kind, words=(args.training_script, *args.training_script_args))
    values: dict[str, Any] = {name: getattr(args, name) for name in flags.PARADIGMS}
    for option in flags.options():
        value = getattr(args, _destination(option))
        is_several = option.kind is tuple and isinstance(value, list)
        text = tuple(map(as_text, value)) if is_several else None if value is None else as_text(value)
        values[option.name.replace(".", "__")] = text
    code = run(script, values, args.config_file, dry_run=args.dry_run, quiet=args.quiet, in_place=False)
    if code and args.quiet:
        sys.exit(1)
    if code:
        raise subprocess.CalledProcessError(code, ["notebook-accel", "launch", *script.words])


def _read_words(read: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
    """Read words as the command does: switches may have a value, and the script ends the flags."""
    words = list(sys.argv[1:] if args is None else args)
    with click.Context(launch, resilient_parsing=True, allow_interspersed_args=False) as context:
        return read(flags.complete_switches(launch, context, words), namespace)


def _spell(name: str) -> list[str]:
    """Return both spellings of a flag."""
    return list(dict.fromkeys([f"--{flags.normalize(name)}", f"--{name}"]))


def _destination(option: Option) -> str:
    flag = str(option.face.flag)
    return _DESTINATIONS.get(flag, flag)


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    flag = str(option.face.flag)
    parser.add_argument(
        *flags.SHORT.get(flag, ()),
        *_spell(flag),
        dest=_destination(option),
        type=str if option.kind is tuple else functools.partial(_read_value, option),
        action="append" if flags.is_repeatable(option) else "store",
        help=option.help.replace("%", "%%"),
    )


def _read_value(option: Option, text: str) -> Any:
    if str(option.face.flag).startswith(_TEXTS) and (flags.is_switch(option) or option.choices is not None):
        return text
    if not flags.is_switch(option):
        return flags.read_value(option, text)
    try:
        return environ.parse_bool(text)
    except ValueError:
        return text  # ConfigError names it when it is launched
