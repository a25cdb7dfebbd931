"""`notebook-accel env`: a block to paste into a bug report."""

from __future__ import annotations

import dataclasses
import json

import rich_click as click

from ..diagnosis import environment


@click.command()
@click.option(
    "--config-file",
    "--config_file",
    type=click.Path(exists=True, dir_okay=False),
    help="The config to show [default: the one that launches look for]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(config_file: str | None, as_json: bool) -> None:
    """Show what a bug report should say about this machine.

    No device is initialised; what looks like a secret is left out.
    """
    found = environment.collect(config_file)
    click.echo(json.dumps(dataclasses.asdict(found), indent=2) if as_json else environment.as_text(found))
