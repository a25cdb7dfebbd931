"""How a command refuses what it was given."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import rich_click as click

from ..errors import CheckpointError


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """End the command with code 2 and the error's sentence where arguments are wrong or a file is damaged."""
    try:
        yield
    except (ValueError, CheckpointError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
