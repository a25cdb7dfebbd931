"""How a command refuses what it was given."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import rich_click as click

from ..errors import CheckpointError


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """End the command with the error's sentence: with code 2 where arguments are wrong or a file is damaged.

    What the system refuses, such as to write to a full disk, ends it with code 1.
    """
    try:
        yield
    except (ValueError, CheckpointError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
