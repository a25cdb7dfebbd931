"""Joins the Trainer of transformers to the notebook: its view shows what Trainer logs, and its stop reaches Trainer."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from .. import processes, runtime
from ..caller import warn
from ..takeover import finder

LIBRARY: Final = "transformers.trainer"


def join() -> None:
    """Give each Trainer that is made from now on a callback of this package.

    A Trainer, also one of another library, makes its Accelerator before its callbacks; it copies the latter from a
    list. It gets ours only where it runs on this package, in a process that reports to a notebook.
    """
    if runtime.reporter() is None or not finder.is_installed():
        return
    kind = getattr(sys.modules["transformers"], "TrainerCallback", None)
    defaults = getattr(sys.modules[LIBRARY], "DEFAULT_CALLBACKS", None)
    if not isinstance(kind, type) or not isinstance(defaults, list):
        version = getattr(sys.modules["transformers"], "__version__", "without a version")
        warn(
            f"transformers {version} is not known: it has no TrainerCallback, or no list trainer.DEFAULT_CALLBACKS. "
            "The notebook shows no losses of Trainer, and a stop ends it without a checkpoint. "
            "`notebook-accel doctor` says which versions were tried",
        )
    elif (callback := make_callback(kind)) not in defaults:
        defaults.append(callback)


@functools.cache
def make_callback(base: type) -> type:
    """Return the callback of this package.

    Args:
        base: TrainerCallback, which has a method for each event that Trainer knows.
    """

    class NotebookReport(base):  # type: ignore[misc]
        """Reports what Trainer logs; when the run is to stop, saves a checkpoint and ends the training.

        Does nothing in a process that no notebook launched.
        """

        def __init__(self) -> None:
            self._is_stopping = False
            self._saved_step: int | None = None
            self._limit: int | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Begin anew."""
            self._is_stopping, self._saved_step = False, None
            self._restore_limit(args)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Give the arguments back as they were."""
            self._restore_limit(args)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Report the numbers that Trainer logs; the last ones are told before it removes checkpoints."""
            if self._is_stopping and "train_loss" in (logs or {}) and args.save_total_limit == 1:
                self._limit, args.save_total_limit = 1, 2  # the best one, and that of the stop
            reporter, current = runtime.reporter(), runtime.current()
            if reporter is None or current is None or not current.topology.is_main:
                return
            from ..tracking.values import numbers_in

            if reporter.takes_metrics(logs or {}) and (numbers := numbers_in(logs or {})):
                reporter.metrics(numbers, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Ask whether to stop. What is due at this step, such as an evaluation, is still done."""
            if runtime.current() is not None and processes.should_stop():
                self._is_stopping = control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Note which step is saved."""
            self._saved_step = state.global_step

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Leave what is due at the end of an epoch to the run that goes on with it.

            Trainer calls this also where the training ends within an epoch. With the strategy "best" it has not saved.
            """
            if not self._is_stopping:
                return
            if not float(state.epoch or 0).is_integer():
                control.should_log = control.should_evaluate = False
            control.should_save = control.should_evaluate or self._saved_step != state.global_step

        def _restore_limit(self, args: Any) -> None:
            if self._limit is not None:
                args.save_total_limit, self._limit = self._limit, None

    return NotebookReport
