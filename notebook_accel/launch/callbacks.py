"""Calls functions of the user's at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import interrupts
from ..notices import tell


def call_back(callbacks: Sequence[Callable[[], None]], run: object) -> None:
    """Call functions of the user's; what one raises is told, and an interrupt comes after the last.

    Args:
        callbacks: called without arguments, in order.
        run: what has ended.

    Raises:
        KeyboardInterrupt: one came meanwhile.
    """
    interrupt = None
    for callback in callbacks:
        try:
            interrupts.obey_interrupt()
        except KeyboardInterrupt as error:  # of what came before: this one is called all the same
            interrupt = error
        try:
            with interrupts.allow_interrupt():
                callback()
        except BaseException as error:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            text = f"{name} failed at the end of {run!r}: {type(error).__name__}: {error}"
            tell(text)
            interrupt = error if isinstance(error, KeyboardInterrupt) else interrupt
    if interrupt is not None:
        raise interrupt
