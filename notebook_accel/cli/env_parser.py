"""The command `env` for programs that call Accelerate's: a parser of its words, and what runs these."""

from __future__ import annotations

import argparse
from pathlib import Path
from shutil import which as which
from typing import Any, Final

from .. import devices, probes
from ..diagnosis import environment
from ..takeover.finder import VERSION
from ..utils.cluster import default_config_file, load_config_from_file
from .argument_parser import CONFIG_FILE, add_flag, make_parser

_NOTHING: Final = "Not found"


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `env`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    text = "Show what a bug report should say about this machine."
    parser = make_parser("env", env_command, text, subparsers)
    add_flag(parser, "config_file", help=CONFIG_FILE)
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print a block for a bug report, and return a part of it under the names of Accelerate's.

    Args:
        args: what a parser of `env_command_parser` read.
    """
    found = environment.collect(args.config_file)
    print(environment.as_text(found))
    kind = devices.best()
    info: dict[str, Any] = {
        "`Accelerate` version": VERSION,
        "Platform": found.platform,
        "`accelerate` bash location": which("accelerate") or _NOTHING,
        "Python version": found.python,
        "Numpy version": probes.version("numpy") or _NOTHING,
        "PyTorch version": found.torch,
        "PyTorch accelerator": "N/A" if kind is devices.CPU else kind.name.upper(),
        "System RAM": f"{found.memory_gib} GB",
    }
    if found.gpus:
        info["GPU type"] = found.gpus[0].name
    is_there = args.config_file is not None or Path(default_config_file).is_file()
    config = load_config_from_file(args.config_file).to_dict() if is_there else _NOTHING
    return {**info, "`Accelerate` configs": config}
