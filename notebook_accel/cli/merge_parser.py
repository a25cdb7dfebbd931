"""The command `merge-weights` for programs that call Accelerate's: a parser of its words, and what runs these."""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpointing.merge import merge_fsdp_weights
from .argument_parser import add_flag, make_parser


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `merge-weights`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    text = "Make ordinary weights of a sharded checkpoint."
    parser = make_parser("merge-weights", merge_command, text, subparsers)
    parser.add_argument("checkpoint_directory", help="What FSDP saved as SHARDED_STATE_DICT.")
    parser.add_argument("output_path", help="The folder for the weights.")
    add_flag(
        parser, "unsafe_serialization", action="store_true", help="Write pytorch_model.bin, not safetensors."
    )
    add_flag(parser, "remove_checkpoint_dir", action="store_true", help="Remove the checkpoint in the end.")
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge the weights of a checkpoint.

    Args:
        args: what a parser of `merge_command_parser` read.
    """
    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
