"""Who may use a thing now, of the threads of a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class Turn:
    """One thread at a time has it, and may take it again; a copy, and that of a forked process, nobody has."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._count = 0
        self._process = os.getpid()

    def take(self) -> bool:
        """Wait until no other thread has it, and return True unless this one had it already."""
        if self._process != os.getpid():  # the thread that had it may not be in this process
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._count += 1
        return self._count == 1

    def give_back(self, before: Callable[[], None]) -> None:
        """Undo one `take`, and call `before` where that was the first; do nothing in a thread that does not have it."""
        if not self._count or self._owner != threading.get_ident():
            return
        try:
            if self._count == 1:
                before()
        finally:
            self._count -= 1
            self._lock.release()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
