"""Shows that a command still works while something takes long."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final

_QUIET_SECONDS: Final = 2.0
_COLUMNS: Final = 100


class Progress:
    """Writes to the error stream what goes on and for how long, from the third second on.

    Args:
        name: what goes on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _show(self) -> None:
        """Write a line that is replaced each second in a terminal, one line elsewhere."""
        started = time.monotonic()
        live = sys.stderr.isatty()
        shown = False
        while not self._done.wait(1.0 if shown and live else None if shown else _QUIET_SECONDS):
            text = f"...... {time.monotonic() - started:6.1f} s  {self._name}"
            sys.stderr.write(f"\r{text}" if live else f"{text}\n")
            sys.stderr.flush()
            shown = True
        if shown and live:
            sys.stderr.write("\r" + " " * _COLUMNS + "\r")
            sys.stderr.flush()
