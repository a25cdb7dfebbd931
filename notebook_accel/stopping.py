"""StopPoint: lets all ranks of a run stop at the same step, without a collective."""

from __future__ import annotations

import threading


class StopPoint:
    """Counts how often this rank asked whether to stop, and answers yes from some question on.

    A stop has three steps. The notebook holds all ranks: the next question of each waits. Each rank reports how many
    questions it has asked. The notebook sends all of them the same number, at which they stop. So no rank starts a
    collective that the others skip. Without a stop nothing is sent.

    Two threads use it: the training calls `reached`, the thread that listens to the notebook calls `hold` and `set`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = 0
        self._held = False
        self._last: int | None = None

    def reached(self) -> bool:
        """Return whether to stop here; wait while a stop is being agreed on."""
        with self._changed:
            self._questions += 1
            while self._held and self._last is None:
                self._changed.wait()
            return self._last is not None and self._questions >= self._last

    def reset(self) -> None:
        """Forget the questions and the stop."""
        with self._changed:
            self._questions, self._held, self._last = 0, False, None
            self._changed.notify_all()

    def hold(self) -> int:
        """Let the next question wait for `set`.

        Returns:
            How many questions there were so far.
        """
        with self._changed:
            self._held = True
            return self._questions

    def set(self, question: int) -> None:
        """Answer yes from a question on, and let a waiting question go on.

        Args:
            question: its number, counted from 1.
        """
        with self._changed:
            self._held = True
            self._last = question
            self._changed.notify_all()
