"""The command `launch` for programs that call Accelerate's: a parser of its words, and a function that runs these."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import rich_click as click

from .. import environ
from ..config.option import Option, as_text
from ..config.schema import flat_values
from ..launch.script import Script
from ..takeover import finder
from ..utils.cluster import (
    ClusterConfig,
    SageMakerConfig,
    default_config_file,
    load_config_from_file,
    raise_value_errors,
)
from ..utils.other import get_free_port
from . import flags
from .argument_parser import add_flag, make_parser
from .launch import launch, run
from .plan import FROM_MACHINE, resolve
from .start import describe_command

_SWITCHES: Final = ("dry_run", *flags.PARADIGMS)
"""Flags without a value that are no options of a config."""
_DESTINATIONS: Final = {"tpu_cluster": "tpu_use_cluster"}
"""Names in the namespace that differ from the flag's."""
_SPELLING: Final = "Flags may have - for _, as in --num-processes."
_TEXTS: Final = ("fsdp_", "zero3_")
"""How flags begin whose values Accelerate's namespace has as they were typed, such as `true`."""


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `launch`; all words after the script are the script's own.

    Args:
        subparsers: of another parser, to which the command is added; its namespace has `launch_command` as `func`.
    """
    description = f"{str(launch.help).splitlines()[0]} {_SPELLING}"
    parser = make_parser("launch", launch_command, description, subparsers)
    read = parser.parse_known_args
    parser.parse_known_args = functools.partial(_read_words, read)  # type: ignore[method-assign]
    add_flag(parser, "config_file", help="Config file to use.")
    add_flag(parser, "quiet", "-q", action="store_true", help="Say nothing but what the script says.")
    add_flag(parser, "module", "-m", action="store_true", help="Run a module, as python -m does.")
    add_flag(parser, "no_python", action="store_true", help="Run a program without Python.")
    for name in _SWITCHES:
        add_flag(parser, name, action="store_true")
    for option in flags.options():
        _add_flag(parser, option)
    add_flag(parser, "no_tpu_cluster", dest="tpu_use_cluster", action="store_false", help="No cluster.")
    for name in ("aws_access_key_id", "aws_secret_access_key"):
        add_flag(parser, name, help=argparse.SUPPRESS)  # for Amazon SageMaker
    parser.set_defaults(tpu_use_cluster=None)
    parser.add_argument("training_script", help="The script, module or program to run.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its own words.")
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run what the words of the command `launch` say, and return when it has ended.

    Args:
        args: what a parser of `launch_command_parser` read, changed or not.

    Raises:
        ConfigValueError: lists everything that is wrong.
        click.UsageError: `module` together with `no_python`, or words that a notebook does not take.
        subprocess.CalledProcessError: it ended with another exit code than 0.
        SystemExit: the same, with `quiet`.
    """
    script = _make_script(args)
    with raise_value_errors():
        code = run(
            script,
            _list_flags(args),
            args.config_file,
            dry_run=args.dry_run,
            quiet=args.quiet,
            in_place=False,
        )
    if code and args.quiet:
        sys.exit(1)
    if code:
        raise subprocess.CalledProcessError(code, ["notebook-accel", "launch", *script.words])


def validate_launch_command(
    args: argparse.Namespace,
) -> tuple[argparse.Namespace, ClusterConfig | SageMakerConfig | None, bool]:
    """Fill in what the words of the command `launch` leave open, and check all of it, as a launch does.

    Args:
        args: what a parser of `launch_command_parser` read; changed in place.

    Returns:
        The same namespace, the config of the launch, None without one, and whether the precision is from it.

    Raises:
        ConfigValueError: lists everything that is wrong.
    """
    with raise_value_errors():
        plan, _ = resolve(_list_flags(args), args.config_file)
    values = flat_values(plan.config)
    for option in flags.options():
        is_open = getattr(args, _destination(option)) is None
        if is_open and (plan.sources[option.name] != FROM_MACHINE or option.name == "num_processes"):
            setattr(args, _destination(option), values[option.name])
    for name, (kind, *_) in flags.PARADIGMS.items():
        setattr(args, name, getattr(args, name) or plan.config.distributed_type == kind)
    is_there = args.config_file is not None or Path(default_config_file).is_file()
    config = load_config_from_file(args.config_file) if is_there else None
    is_from_config = plan.sources["mixed_precision"] not in ("flag", "default", FROM_MACHINE)
    return args, config, is_from_config


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of a launch of one process.

    Args:
        args: what a parser of `launch_command_parser` read.

    Raises:
        ConfigValueError: lists everything that is wrong.
        click.UsageError: `module` together with `no_python`.
    """
    with raise_value_errors():
        plan, _ = resolve(_list_flags(args), args.config_file)
    texts = {**environ.snapshot(), **plan.environment, **plan.derived}
    return describe_command(_make_script(args)), finder.complete_variables(texts)


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a launch by torchrun, and put into a namespace what torchrun's parser would have there.

    Args:
        args: what a parser of `launch_command_parser` read, or a part of it. It gets `nnodes`, `nproc_per_node`,
            `node_rank`, `master_addr` and `master_port`, as texts; port 0 becomes a free one.

    Raises:
        ConfigValueError: lists everything that is wrong.
    """
    with raise_value_errors():
        plan, _ = resolve(_list_flags(args), getattr(args, "config_file", None))
    config = plan.config
    nodes = config.num_machines
    args.nnodes, args.node_rank = str(nodes), str(config.machine_rank)
    args.nproc_per_node = str((config.num_processes or 1) // nodes)
    args.master_addr = config.main_process_ip or "127.0.0.1"
    args.master_port = str(config.main_process_port or get_free_port())
    return finder.complete_variables({**environ.snapshot(), **plan.environment, **plan.derived})


def _make_script(args: argparse.Namespace) -> Script:
    if args.module and args.no_python:
        raise click.UsageError("--module and --no_python exclude each other")
    kind: Any = "module" if args.module else "program" if args.no_python else "script"
    return Script(kind=kind, words=(args.training_script, *args.training_script_args))


def _list_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags as texts; see `plan.resolve`."""
    values: dict[str, Any] = {name: getattr(args, name, None) for name in flags.PARADIGMS}
    for option in flags.options():
        value: Any = getattr(args, _destination(option), None)
        is_several = option.kind is tuple and isinstance(value, (list, tuple))
        text = tuple(map(as_text, value)) if is_several else None if value is None else as_text(value)
        values[option.name.replace(".", "__")] = text
    return values


def _read_words(read: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
    """Read words as the command does: switches may have a value, and the script ends the flags."""
    words = list(sys.argv[1:] if args is None else args)
    with click.Context(launch, resilient_parsing=True, allow_interspersed_args=False) as context:
        return read(flags.complete_switches(launch, context, words), namespace)


def _destination(option: Option) -> str:
    flag = str(option.face.flag)
    return _DESTINATIONS.get(flag, flag)


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    flag = str(option.face.flag)
    add_flag(
        parser,
        flag,
        *flags.SHORT.get(flag, ()),
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
