"""`notebook-accel doctor`: what hinders launches on this machine, and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Final

import rich_click as click

from ..diagnosis.check import Check, as_line
from ..diagnosis.checks import run_checks
from ..diagnosis.report import DoctorReport

_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--fix", is_flag=True, help="Print the commands that mend what was found, as a shell script.")
def doctor(as_json: bool, fix: bool) -> None:
    """Look for what hinders launches, and say how to mend it.

    The exit code is 1 where there is a problem, 0 where there are warnings at most. No device is initialised.
    """
    if as_json and fix:
        raise click.UsageError("--json shows what is found, and --fix what mends it: use one of them")
    found = []
    for check in run_checks():
        found.append(check)
        if not as_json and (line := check.as_script if fix else _line(check)):
            click.echo(line)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    elif not fix:
        click.echo(DoctorReport(tuple(found)).summary)
    sys.exit(any(check.status == "problem" for check in found))


def _line(check: Check) -> str:
    return as_line(check, click.style(f"{check.status:<8}", fg=_COLOURS[check.status]))
