"""Raises all problems of a call as one exception; checks numbers of seconds, and whose process it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Real
from typing import Any


def raise_all(problems: Sequence[Exception], caller: str) -> None:
    """Raise all problems as one exception, with wrong types first in its message. Without a problem raise nothing.

    Args:
        problems: one exception for each problem.
        caller: name of the function that the user called; the message starts with it.

    Raises:
        TypeError: all problems are a TypeError.
        ValueError: at least one problem is not.
    """
    __tracebackhide__ = True
    if not problems:
        return
    texts = [
        str(problem) for problem in sorted(problems, key=lambda problem: not isinstance(problem, TypeError))
    ]
    if len(texts) == 1:
        message = f"{caller}: {texts[0]}"
    else:
        message = f"{caller}: {len(texts)} problems\n" + "\n".join(f"  - {text}" for text in texts)
    all_types = all(isinstance(problem, TypeError) for problem in problems)
    raise TypeError(message) if all_types else ValueError(message)


def check_owner(pid: int, what: str, kind: type[Exception]) -> None:
    """Check that this process made something. A forked copy has none of the threads that make it go on.

    Args:
        pid: of the process that made it.
        what: what it is.
        kind: of the error.

    Raises:
        Exception: of this kind: another process made it.
    """
    __tracebackhide__ = True
    if os.getpid() != pid:
        raise kind(f"the {what} belongs to the process that made it, of which this one is a copy")


def check_seconds(least: float = 0.0, /, **seconds: Any) -> None:
    """Check that values are numbers of seconds.

    Args:
        least: the smallest legal number of seconds.
        seconds: values by the names of their arguments.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is smaller than `least`, or NaN.
    """
    __tracebackhide__ = True
    for name, value in seconds.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: seconds are needed")
        if not float(value) >= least:
            raise ValueError(f"{name}={value!r}: {least:g} seconds or more are needed")
