"""`notebook-accel config`: a config file by questions, for this machine, or in today's words."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich_click as click

from ..config import basic, document, file
from ..config.schema import LaunchConfig
from . import flags
from .main import INTERRUPTED
from .questions import Questionnaire, confirm


def _add_shared_flags(command: Any) -> Any:
    """Give a command the flags of the schema and the one that names the file."""
    return click.option(
        "--config-file",
        type=click.Path(path_type=Path),
        help="The file, ending in .yaml, .yml or .json; by default the one that launches look for.",
    )(flags.add_flags(command))


_every_option = click.option("--all", "ask_all", is_flag=True, help="Ask for the expert options too.")


@click.group(invoke_without_command=True, context_settings=flags.settings())
@_every_option
@_add_shared_flags
@click.pass_context
def config(ctx: click.RichContext, /, ask_all: bool, config_file: Path | None, **values: Any) -> None:
    """Write or change a config file.

    Without a subcommand: questions, the default of each being what fits this machine. What a flag says is not asked.
    """
    ctx.obj = {"config_file": config_file, **values}
    if ctx.invoked_subcommand is not None:
        return
    given = flags.parse(values)
    path = _path(config_file)
    _need_terminal()
    _ask(path, Questionnaire(lambda answers: basic.detect(**answers), given, every=ask_all))


@config.command("default", context_settings=flags.settings())
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@_add_shared_flags
@click.pass_context
def default(ctx: click.RichContext, /, overwrite: bool, config_file: Path | None, **values: Any) -> None:
    """Write a config that fits this machine, without a question asked."""
    values, path = _merge(ctx, config_file, values)
    written = basic.detect(**flags.parse(values))
    if path.exists() and not overwrite:
        click.echo(f"{path} is there already and was left as it is: --overwrite replaces it", err=True)
        return
    _write(written, path, replace=True)


@config.command("update", context_settings=flags.settings())
@click.option("--ask", is_flag=True, help="Ask questions, the default of each being what the file says.")
@_every_option
@_add_shared_flags
@click.pass_context
def update(
    ctx: click.RichContext, /, ask: bool, ask_all: bool, config_file: Path | None, **values: Any
) -> None:
    """Write an older file in today's words, with the flags on top of it; its comments stay."""
    values, path = _merge(ctx, config_file, values)
    if not path.exists():
        raise click.ClickException(f"there is no file {path} to update: `notebook-accel config` writes one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said below, in a sentence
        found = file.read(path)
    if found.ignored:
        click.echo(f"{path}: {', '.join(found.ignored)} means nothing any more and is left out", err=True)
    old = found.config
    if not (ask or ask_all):
        _write(flags.apply(old, values), path)
        return
    _need_terminal()
    _ask(path, Questionnaire(lambda answers: old, flags.parse(values), every=ask_all), old=old)


def _merge(
    ctx: click.Context, config_file: Path | None, values: Mapping[str, Any]
) -> tuple[dict[str, Any], Path]:
    """Return the flags and the path; those before the subcommand count too."""
    merged = {name: ctx.obj.get(name) if value in (None, ()) else value for name, value in values.items()}
    return merged, _path(config_file or ctx.obj["config_file"])


def _path(config_file: Path | None) -> Path:
    """Return the file to write; ClickException where that cannot become one."""
    path = document.expand(config_file) if config_file is not None else file.default_path()
    if path.is_dir():
        raise click.ClickException(f"{path} is a folder: name a file, such as {path / 'default_config.yaml'}")
    if path.suffix not in document.ENDINGS:
        raise click.ClickException(f"{path} does not end in {', '.join(document.ENDINGS)}")
    return path


def _need_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "there is no terminal to ask questions in: `notebook-accel config default` writes a config for this "
            "machine without any, and takes options as flags, such as `config default --num_processes 4`"
        )


def _ask(path: Path, questions: Questionnaire, old: LaunchConfig | None = None) -> None:
    """Ask, show the file, write it; Ctrl-C and Ctrl-D leave everything as it was."""
    try:
        chosen = questions.ask()
        click.echo(f"\n{path}:\n")
        click.echo(file.as_yaml(chosen))
        if old is None and path.exists() and not confirm(f"{path} is there already. Replace it?"):
            click.echo("Nothing was written.", err=True)
            sys.exit(1)
    except (KeyboardInterrupt, EOFError):
        click.echo("Stopped: nothing was written.", err=True)
        sys.exit(INTERRUPTED)
    _write(chosen, path, replace=old is None)


def _write(config: LaunchConfig, path: Path, *, replace: bool = False) -> None:
    """Write a config; replace also what is no config file."""
    try:
        config.write(path, replace=replace)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}") from None
    click.echo(f"Wrote {path}")
