"""The command itself: its subcommands are imported when they are called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, Final

import rich_click as click

from .. import environ
from ..errors import ConfigError
from .refusal import end_without_reader, refuse_errors

INTERRUPTED: Final = 130
"""The exit code of what Ctrl-C ended, as shells have it."""

COMMANDS: Final = {
    "config": "Write or change a config file.",
    "launch": "Run a script, a module or a notebook on several processes.",
    "attach": "Show a run that outlives its notebook.",
    "runs": "List the runs that outlive their notebooks.",
    "env": "Show what a bug report should say about this machine.",
    "test": "Try out whether launches work on this machine.",
    "estimate-memory": "Show how much memory a model needs to be loaded and trained.",
    "merge-weights": "Make ordinary weights of a sharded checkpoint.",
    "doctor": "Look for what hinders launches, and say how to mend it.",
}
"""Subcommands, each the module of its name, with `_` for `-`, in this package with a click command of that name."""

OF_ACCELERATE: Final = {
    "to-fsdp2": ("to_fsdp2_parser", "to_fsdp2_command_parser", "to_fsdp2_command"),
    "tpu-config": ("tpu_parser", "tpu_command_parser", "tpu_command_launcher"),
}
"""Subcommands that help does not list: the module, the function that returns a parser, and the one that runs it."""


class Lazy(click.RichGroup):
    """A group that imports a subcommand when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if _exists(name)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a subcommand; for a list of them, one that has its name and a line of help."""
        if name in OF_ACCELERATE:
            return _make_command(name)
        if name not in COMMANDS or not _exists(name):
            return None
        return click.RichCommand(name=name, short_help=COMMANDS[name])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = getattr(importlib.import_module(f"{__package__}.{_module(name)}"), _module(name))
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; an interrupt that it does not handle itself ends it with the code that shells know."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


def _make_command(name: str) -> click.Command:
    """Return a subcommand that leaves its words to a parser."""

    @click.command(
        name,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def command(words: tuple[str, ...]) -> None:
        module, make_parser, run = OF_ACCELERATE[name]
        found = importlib.import_module(f"{__package__}.{module}")
        args = getattr(found, make_parser)().parse_args(words)
        with refuse_errors():
            getattr(found, run)(args)

    return command


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"{__package__}.{_module(name)}") is not None


def _module(name: str) -> str:
    return name.replace("-", "_")


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="notebook-accel", prog_name="notebook-accel")
def cli() -> None:
    """Distributed PyTorch: configure, launch and check."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command; wrong options and configs end with code 2 and a sentence on the error stream."""
    with end_without_reader():
        try:
            return cli.main(args=arguments, prog_name="notebook-accel")
        except ConfigError as error:
            for problem in error.problems:
                click.echo(f"Error: {problem}", err=True)
            sys.exit(2)
        except environ.VariableError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(2)
