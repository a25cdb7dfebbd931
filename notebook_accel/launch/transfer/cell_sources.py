"""The source lines of the notebook's cells, for tracebacks and `inspect` in workers that were not forked."""

from __future__ import annotations

import linecache
import os
from collections.abc import Collection, Mapping


def collect(known: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the source lines of code that is in no file.

    Args:
        known: file names to leave out.

    Returns:
        Lines by the file name under which the code was compiled.
    """
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())  # which other threads add to
        if name not in known and len(entry) == 4 and entry[2] and not os.path.exists(name)
    }


def install(sources: Mapping[str, list[str]]) -> None:
    """Let this process find lines; `linecache` keeps entries without a time although there is no file."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
