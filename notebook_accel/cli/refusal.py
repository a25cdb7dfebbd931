"""How a command ends where its arguments are wrong, or the system refuses something."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import rich_click as click

from ..errors import CheckpointError


@contextlib.contextmanager
def refuse_errors() -> Iterator[None]:
    """End the command with the sentence of an error that the block raises.

    The exit code is 2 where arguments are wrong or a file is damaged. It is 1 where the system refuses something, such
    as to write to a full disk.
    """
    try:
        yield
    except (ValueError, CheckpointError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
