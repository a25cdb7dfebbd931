"""The sources of the notebook's cells, for workers that were not forked: tracebacks and `inspect` read them."""

from __future__ import annotations

import linecache
import os
from collections.abc import Collection, Mapping


def collect(known: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the lines of code that is in no file, by the name under which it was compiled, without those `known`."""
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())  # which other threads add to
        if name not in known and len(entry) == 4 and entry[2] and not os.path.exists(name)
    }


def install(sources: Mapping[str, list[str]]) -> None:
    """Let this process find the lines; entries without a time are kept though there is no file."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
