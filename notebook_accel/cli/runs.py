"""`notebook-accel runs`: lists the runs that outlive their notebooks."""

from __future__ import annotations

import rich_click as click

from .refusal import refuse_errors


@click.command()
@click.option("--prune", is_flag=True, help="Remove now what is over and is of this machine.")
def runs(prune: bool) -> None:
    """List the runs that were launched with `detach=True`.

    One that is over is removed 30 days later, or after the days that NOTEBOOK_ACCEL_STATE_DAYS has.
    """
    from ..launch import attaching

    with refuse_errors():
        if prune:
            for name in attaching.prune():
                click.echo(f"removed {name}")
            return
        rows = attaching.list_runs()
    if not rows:
        click.echo("There are no such runs.")
        return
    headings = list(rows[0])
    lines = [headings, *(list(row.values()) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
