"""How ranks that are asked to stop agree on where: at the same question of theirs, without a word in between."""

from __future__ import annotations

import threading


class StopPoint:
    """Counts how often this rank asked whether to stop, and knows from which question on the answer is yes.

    While a stop is under way two threads share it: `reached` is the training's, `hold` and `set` are the thread's that
    listens to the notebook. All ranks are held, tell how far they are, and get the same number, so that none goes
    on to a collective that the others leave out. Nothing is sent while nobody stops.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = 0
        self._held = False
        self._last: int | None = None

    def reached(self) -> bool:
        """Return whether to stop; waits while the ranks agree."""
        with self._changed:
            self._questions += 1
            while self._held and self._last is None:
                self._changed.wait()
            return self._last is not None and self._questions >= self._last

    def reset(self) -> None:
        """Forget all that was asked and told."""
        with self._changed:
            self._questions, self._held, self._last = 0, False, None
            self._changed.notify_all()

    def hold(self) -> int:
        """Let the next question wait for `set`; return how many there were."""
        with self._changed:
            self._held = True
            return self._questions

    def set(self, question: int) -> None:
        """Answer yes from this question on."""
        with self._changed:
            self._held = True
            self._last = question
            self._changed.notify_all()
