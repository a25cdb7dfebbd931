"""Warnings that point at the user's line, however deep in this package they are made."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import is_dataclass
from types import FrameType

_PACKAGE = __name__.partition(".")[0]
_BETWEEN = ("contextlib", "functools")  # on the way from one of our functions to another


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn as `warnings.warn` does, at the innermost line that is not of this package.

    Args:
        text: what is wrong, and what to do.
        category: class of the warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_passed_over(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def find_line(cell: re.Pattern[str]) -> tuple[str, int]:
    """Return file and line of the innermost caller in a cell; without one, of the innermost in another package.

    Args:
        cell: what names of cells' files have.
    """
    frame = sys._getframe(1)
    found: FrameType | None = frame
    while found is not None and not cell.search(found.f_code.co_filename):
        found = found.f_back
    while found is None and frame.f_back is not None and _is_passed_over(frame):
        frame = frame.f_back
    found = found or frame
    return found.f_code.co_filename, found.f_lineno


def _is_passed_over(frame: FrameType) -> bool:
    """Return whether a frame is of this package, between its functions, or a constructor that dataclass has made."""
    module = str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] == _PACKAGE or module in _BETWEEN or _is_generated(frame)


def _is_generated(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_filename != "<string>" or code.co_name != "__init__":
        return False
    return is_dataclass(frame.f_locals.get(code.co_varnames[0] if code.co_varnames else ""))
