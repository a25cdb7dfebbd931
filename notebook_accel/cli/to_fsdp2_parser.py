"""The command `to-fsdp2`: writes a config file's options of FSDP in the words of its version 2."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any, Final

from ..config import document
from ..utils.cluster import read_values
from .argument_parser import add_flag, make_parser

_log = logging.getLogger(__name__)
_RESHARD: Final = "fsdp_reshard_after_forward"
_RENAMED: Final = {"fsdp_sharding_strategy": _RESHARD}
_STRATEGIES: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
"""Strategies of version 1: whether weights are given back after the forward pass, which is all that version 2 asks."""
_GONE: Final = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)
"""Options of version 1 that version 2 has not."""


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `to-fsdp2`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    text = "Write a config file's options of FSDP in the words of its version 2."
    parser = make_parser("to-fsdp2", to_fsdp2_command, text, subparsers)
    add_flag(parser, "config_file", required=True, help="The file to read.")
    add_flag(
        parser, "output_file", help="The file to write [default: the one that is read, with --overwrite]"
    )
    add_flag(parser, "overwrite", action="store_true", help="Replace a file that is there.")
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a config file.

    Args:
        args: what a parser of `to_fsdp2_command_parser` read.

    Raises:
        FileNotFoundError: there is no such file.
        FileExistsError: the output is there already, and is not to be replaced.
        ValueError: no output is named, or the file is empty.
    """
    if not Path(args.config_file).exists():
        raise FileNotFoundError(f"there is no config file {args.config_file}")
    if args.output_file is None and not args.overwrite:
        raise ValueError("name a file to write, --output_file, or replace the one that is read, --overwrite")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"{args.output_file} is there already: --overwrite replaces it")
    values = convert_config_to_fsdp2(load_config(args.config_file))
    path = Path(args.output_file or args.config_file)
    is_json = path.suffix == ".json"
    text = f"{json.dumps(values, indent=2)}\n" if is_json else document.as_yaml(values)
    path.write_text(text, encoding="utf-8")


def load_config(config_file: str) -> dict[str, Any]:
    """Return the values in a config file.

    Args:
        config_file: its path.

    Raises:
        ValueError: there are none.
    """
    values = read_values(Path(config_file))
    if not values:
        raise ValueError(f"{config_file} is empty")
    return values


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with its options of FSDP in the words of version 2; what version 2 has not is left out.

    Args:
        config: values of a file; changed in place.
    """
    before = config.get("fsdp_config") or {}
    if not before:
        _log.info("the config has no options of FSDP, and stays as it is")
        return config
    if before.get("fsdp_version", 1) == 2:
        _log.warning("the config is one of FSDP's version 2 already, and stays as it is")
        return config
    if left_out := [name for name in before if name in _GONE]:
        _log.warning("%s: left out, FSDP's version 2 has no such option", ", ".join(left_out))
    kept = {_RENAMED.get(name, name): value for name, value in before.items() if name not in _GONE}
    if isinstance(strategy := kept.get(_RESHARD), str):
        kept[_RESHARD] = _STRATEGIES.get(strategy, strategy)
    config["fsdp_config"] = {**kept, "fsdp_version": 2}
    return config
