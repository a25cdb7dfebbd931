"""A thread that writes one checkpoint while training goes on."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

from ..errors import CheckpointError
from .write import Copies


class Writer:
    """Writes one checkpoint at a time; its errors are raised by the next `wait`."""

    def __init__(self) -> None:
        self.copies = Copies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None], what: str) -> None:
        """Run `work` in a thread, which the interpreter waits for before it ends."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by the next wait
                self._error = error

        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=run, name=f"checkpoint {what}", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return once the checkpoint is on the disk; CheckpointError if it could not be written."""
        self._join()
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint saved in the background was not written: {error}") from error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.copies.reset()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._join()
        if self._error is not None:
            print(f"a checkpoint saved in the background was not written: {self._error}", file=sys.stderr)
