"""`notebook-accel env`: a block to paste into a bug report."""

from __future__ import annotations

import dataclasses
import json

import rich_click as click

from ..diagnosis import environment


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Show what a bug report should say about this machine.

    No device is initialised; what looks like a secret is left out.
    """
    found = environment.collect()
    click.echo(json.dumps(dataclasses.asdict(found), indent=2) if as_json else environment.as_text(found))
