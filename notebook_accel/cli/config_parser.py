"""The command `config` for programs that call Accelerate's: parsers of its words, and what runs these."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..config.basic import write_basic_config
from ..utils.cluster import default_config_file
from .argument_parser import CONFIG_FILE, add_flag, make_parser
from .config import config

_PRECISIONS: Final = ("no", "fp16", "bf16")


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the commands `config`, `config default` and `config update`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    parser = config_command_parser(subparsers)
    inner = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(inner)
    update_command_parser(inner)
    return parser


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `config`, without those inside it.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    parser = make_parser("config", config_command, "Write a config file by questions.", subparsers)
    add_flag(parser, "config_file", help=CONFIG_FILE)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask questions, and write the config.

    Args:
        args: what a parser of `config_command_parser` read.

    Raises:
        click.UsageError: there is no terminal to ask in.
    """
    config.main(_name(args.config_file), standalone_mode=False)


def default_command_parser(
    parser: Any, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `config default`.

    Args:
        parser: the subparsers to which the command is added.
        parents: parsers whose flags it has too.
    """
    text = "Write a config that fits this machine."
    made: argparse.ArgumentParser = parser.add_parser("default", parents=list(parents), help=text)
    add_flag(made, "config_file", dest="save_location", default=default_config_file, help=CONFIG_FILE)
    add_flag(made, "mixed_precision", choices=_PRECISIONS, default="no", help="Precision of the training.")
    made.set_defaults(func=default_config_command)
    return made


def default_config_command(args: argparse.Namespace) -> None:
    """Write a config that fits this machine; a file that is there stays.

    Args:
        args: what a parser of `default_command_parser` read.
    """
    if path := write_basic_config(args.mixed_precision, args.save_location):
        print(f"Wrote {path}")


def update_command_parser(
    parser: Any, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `config update`.

    Args:
        parser: the subparsers to which the command is added.
        parents: parsers whose flags it has too.
    """
    text = "Write an older file in today's words."
    made: argparse.ArgumentParser = parser.add_parser("update", parents=list(parents), help=text)
    add_flag(made, "config_file", help=CONFIG_FILE)
    made.set_defaults(func=update_config_command)
    return made


def update_config_command(args: argparse.Namespace) -> None:
    """Write an older file in today's words.

    Args:
        args: what a parser of `update_command_parser` read.
    """
    update_config(args)


def update_config(args: argparse.Namespace) -> str:
    """Write an older file in today's words, and return its path.

    Args:
        args: see `update_config_command`.

    Raises:
        ValueError: there is no such file.
    """
    path = args.config_file or default_config_file
    if not Path(path).exists():
        raise ValueError(f"there is no config file {path} to update")
    config.main(["update", *_name(path)], standalone_mode=False)
    return str(path)


def _name(path: str | None) -> list[str]:
    return [] if path is None else ["--config-file", str(path)]
