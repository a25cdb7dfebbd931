"""The command `tpu-config`: runs commands on all machines of a TPU pod, by Google's `gcloud`."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any, Final

from ..utils.cluster import ClusterConfig, default_config_file, load_config_from_file
from .argument_parser import CONFIG_FILE, add_flag, make_parser

_FOLDER: Final = "cd /usr/share"
_VERSIONS: Final = {
    "latest": "accelerate -U",
    "dev": "git+https://github.com/huggingface/accelerate.git",
}


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the words of the command `tpu-config`.

    Args:
        subparsers: of another parser, to which the command is added.
    """
    text = "Run commands on all machines of a TPU pod."
    parser = make_parser("tpu-config", tpu_command_launcher, text, subparsers)
    add_flag(parser, "config_file", help=CONFIG_FILE)
    add_flag(parser, "tpu_name", help="Name of the TPU [default: the config's]")
    add_flag(parser, "tpu_zone", help="Zone of the TPU [default: the config's]")
    add_flag(parser, "use_alpha", action="store_true", help="Call `gcloud alpha`.")
    add_flag(parser, "command_file", help="A file of commands, one on each line.")
    add_flag(parser, "command", action="append", nargs="+", help="A command; may be given several times.")
    add_flag(parser, "install_accelerate", action="store_true", help="Install Accelerate there first.")
    add_flag(parser, "accelerate_version", default="latest", help="A version of it, latest or dev.")
    add_flag(parser, "debug", action="store_true", help="Print what would be run, and run nothing.")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run commands on all machines of a TPU pod.

    Args:
        args: what a parser of `tpu_command_parser` read.

    Raises:
        ValueError: there are no commands, or no name or zone of a TPU.
        ConfigError: something in the config is wrong.
    """
    words = _describe_call(args)
    if args.debug:
        print(f"Running {' '.join(words)}")
        return
    done = subprocess.run(words, check=False)
    print(f"gcloud ended with exit code {done.returncode}" if done.returncode else "The pod is set up.")


def _describe_call(args: argparse.Namespace) -> list[str]:
    """Return the words that call gcloud."""
    name, zone, file, commands = args.tpu_name, args.tpu_zone, args.command_file, args.command
    if args.config_file is not None or Path(default_config_file).is_file():
        config = load_config_from_file(args.config_file)
        if isinstance(config, ClusterConfig):
            name, zone = name or config.tpu_name, zone or config.tpu_zone
            if not (file or commands):
                file, commands = config.command_file, config.commands
    if not (file or commands):
        raise ValueError(
            "there is nothing to run: give --command or --command_file, or a config that has one"
        )
    if not (name and zone):
        raise ValueError("which TPU? give --tpu_name and --tpu_zone, or a config that has them")
    if file:
        commands = Path(file).read_text(encoding="utf-8").splitlines()
    lines = [line for part in commands for line in ([part] if isinstance(part, str) else part)]
    if args.install_accelerate:
        version = args.accelerate_version
        lines.insert(0, f"pip install {_VERSIONS.get(version, f'accelerate=={version}')}")
    call = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh"]
    return [*call, name, "--zone", zone, "--command", "; ".join([_FOLDER, *lines]), "--worker", "all"]
