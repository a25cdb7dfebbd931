"""How a command ends where its arguments are wrong, the system refuses something, or nobody reads what it writes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Final

import rich_click as click

from ..errors import CheckpointError

_UNREAD: Final = 1  # as click has it


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
    except BrokenPipeError:  # see `end_without_reader`
        raise
    except OSError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)


@contextlib.contextmanager
def end_without_reader() -> Iterator[None]:
    """End the command without a word where the block writes to a pipe whose reader has gone, as `head` does.

    Streams are flushed here. What Python flushes only at its own end leads to a complaint on stderr and exit code 120.
    """
    is_lost = False
    try:
        yield
    except BrokenPipeError:
        is_lost = True
    except SystemExit:
        if not _drop_unread():
            raise
        is_lost = True
    if _drop_unread() or is_lost:
        sys.exit(_UNREAD)


def _drop_unread() -> bool:
    """Flush the output and the error stream; return whether one has no reader. It leads nowhere from then on."""
    is_lost = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it was closed before this began
                stream.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError) and stream is sys.stdout:  # a full disk
                click.echo(f"Error: the output cannot be written: {error}", err=True)
            is_lost = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return is_lost
