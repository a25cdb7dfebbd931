"""`notebook-accel doctor`: what hinders launches on this machine, and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Final

import rich_click as click

from ..diagnosis import repairs
from ..diagnosis.check import Check, as_line
from ..diagnosis.checks import run_checks
from ..diagnosis.report import DoctorReport

_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--fix", is_flag=True, help="Offer to repair what can be repaired without harm, one after the other."
)
@click.option("--yes", is_flag=True, help="With --fix: repair without asking.")
def doctor(as_json: bool, fix: bool, yes: bool) -> None:
    """Look for what hinders launches, and say how to mend it.

    The exit code is 1 where there is a problem, 0 where there are warnings at most. No device is initialised.
    """
    if as_json and fix:
        raise click.UsageError("--json shows what is found, and --fix asks: use one of them")
    if yes and not fix:
        raise click.UsageError("--yes goes with --fix")
    found = []
    for check in run_checks():
        found.append(check)
        if not as_json:
            click.echo(_line(check))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    else:
        click.echo(DoctorReport(tuple(found)).summary)
    if fix and _repair(found, yes):
        found = list(run_checks())
    sys.exit(any(check.status == "problem" for check in found))


def _line(check: Check) -> str:
    return as_line(check, click.style(f"{check.status:<8}", fg=_COLOURS[check.status]))


def _repair(checks: Iterable[Check], yes: bool) -> bool:
    """Do what the user wants done; return whether anything was."""
    changed = False
    for one in repairs.find(checks):
        click.echo(repairs.describe(one))
        if isinstance(one, repairs.Repair) and (yes or _confirm()):
            click.echo(repairs.apply(one))
            changed = True
    return changed


def _confirm() -> bool:
    if not sys.stdin.isatty():
        click.echo("not done: there is no terminal to ask in, and --yes was not given")
        return False
    return click.confirm("Do it?", default=False)
