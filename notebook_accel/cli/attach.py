"""`notebook-accel attach`: shows a run that outlives its notebook, in a terminal."""

from __future__ import annotations

import sys

import rich_click as click

from ..errors import LaunchError, RunStoppedError


@click.command()
@click.argument("run", required=False)
@click.option("--stop", is_flag=True, help="Ask it to stop; its ranks have 30 seconds to save and return.")
@click.option("--hosts", metavar="HOST,...", help="Those of a launch by ssh, the first of which has the run.")
def attach(run: str | None, stop: bool, hosts: str | None) -> None:
    """Show a run that was launched with `detach=True`: its output so far, then what comes.

    RUN is its number, that of its job of SLURM, or its name; without it, it is the one that was launched last. Ctrl-C
    leaves the run, which goes on.
    """
    from ..launchers import attach as watch

    where = None if hosts is None else hosts.split(",")
    try:
        if stop:
            shown = watch(run, hosts=where, block=False, view="text")
            shown.stop()
            value = shown.result()
        else:
            value = watch(run, hosts=where, view="text")
    except KeyboardInterrupt as error:
        click.echo(f"\n{error}", err=True)
        raise
    except (LaunchError, RunStoppedError) as error:
        is_wanted = stop and isinstance(error, RunStoppedError)
        click.echo(str(error) if is_wanted else f"Error: {error}", err=True)
        sys.exit(0 if is_wanted else 1)
    except Exception:  # a rank's own, with its traceback
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    if value is not None:
        click.echo(repr(value))
