"""Sentences of the package's own for the user, on stderr."""

from __future__ import annotations

import sys


def tell(text: str, by: str = "notebook_accel") -> None:
    """Write a sentence to stderr in one piece, so that what another thread prints meanwhile does not split it.

    Args:
        text: without a newline.
        by: what says it, which is put before it.
    """
    if sys.stderr is not None:  # a program without a console has none
        sys.stderr.write(f"{by}: {text}\n")
