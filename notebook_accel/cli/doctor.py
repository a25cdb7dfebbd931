"""`notebook-accel doctor`: what hinders launches on this machine, and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Final

import rich_click as click

from ..diagnosis.checks import Check, as_line, run_checks

_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Look for what hinders launches, and say how to mend it.

    The exit code is 1 where there is a problem, 0 where there are warnings at most. No device is initialised.
    """
    found = []
    for check in run_checks():
        found.append(check)
        if not as_json:
            click.echo(_line(check))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    sys.exit(any(check.status == "problem" for check in found))


def _line(check: Check) -> str:
    return as_line(check, click.style(f"{check.status:<8}", fg=_COLOURS[check.status]))
