"""A lease: which thread of a process may use something now."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class ReentrantLease:
    """One thread at a time holds it, and that thread may acquire it again.

    A copy of a lease is free. So is a lease in a forked process, since the thread that held it is not there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._count = 0
        self._process = os.getpid()

    def acquire(self) -> bool:
        """Wait until no other thread holds the lease, and return True unless this thread held it already."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._count += 1
        return self._count == 1

    def release(self, before: Callable[[], None]) -> None:
        """Undo one `acquire`; do nothing in a thread that does not hold the lease.

        Args:
            before: called before the thread gives the lease back, which is when it undoes its first `acquire`.
        """
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
