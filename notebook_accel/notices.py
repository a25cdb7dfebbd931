"""Sentences of the package's own for the user, on stderr."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """Write a sentence to stderr in one piece, so that what another thread prints meanwhile does not split it.

    Args:
        text: without the package's name, which is put before it, and without a newline.
    """
    if sys.stderr is not None:  # a program without a console has none
        sys.stderr.write(f"notebook_accel: {text}\n")
