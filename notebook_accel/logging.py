"""get_logger: a logger that chooses which ranks log, and puts the rank before each message."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from . import environ, runtime
from .takeover.names import complete_names

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # takes no type before Python 3.11

_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


class MultiProcessAdapter(_Adapter):
    """A logger for rank 0, for all ranks, or for all ranks in order; messages start with the rank.

    Every method that logs takes two more keywords:

    - `main_process_only`: False logs in all ranks; True is the default.
    - `in_order`: True logs in all ranks, one after the other. All ranks have to make the call, and the level has to be
      enabled in all of them or in none, because they wait for each other.

    Args:
        logger: the logger of the standard library.
        extra: see `logging.LoggerAdapter`.

    Raises:
        RuntimeError: a message comes before the first `PartialState` or `Accelerator`.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[str] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with the rank before it.

        Args:
            msg: the message.
            kwargs: of the call that logs.

        Returns:
            The message and the keywords of the logger.
        """
        msg, kwargs = super().process(msg, kwargs)
        return f"[RANK {_require_runtime().topology.rank}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a message in the ranks that the keywords choose.

        Args:
            level: of `logging`.
            msg: the message.
            args: replace the placeholders of the message.
            kwargs: `main_process_only`, `in_order`, and those of `logging.Logger.log`.
        """
        running = _require_runtime()
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)  # the caller's line; this method is the first, as in Accelerate
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        if not in_order:
            if running.topology.is_main or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        for rank in range(running.topology.world_size):
            if rank == running.topology.rank:
                self.logger.log(level, msg, *args, **kwargs)
                _flush()
            running.comm.barrier()

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless this logger has logged one with the same arguments.

        Args:
            msg: the message.
            args: replace the placeholders of the message.
            kwargs: see `log`.
        """
        key = repr((msg, args, sorted(kwargs.items())))
        if key not in self._warned:
            # not by `warning`: Python 3.10 counts its frame too
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 2) + 1})
            self._warned.add(key)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for a run of any number of processes.

    Args:
        name: see `logging.getLogger`.
        log_level: name of a level in any case, for this logger and the root logger; by default ACCELERATE_LOG_LEVEL.
            Without either, levels do not change.

    Raises:
        ValueError: the level is unknown.
    """
    chosen = environ.get("ACCELERATE_LOG_LEVEL") if log_level is None else log_level
    logger = logging.getLogger(name)
    if chosen:
        level = _check_level(chosen, "log_level" if log_level is not None else "ACCELERATE_LOG_LEVEL")
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})


def _check_level(word: str, source: str) -> str:
    level = str(word).upper()
    if not isinstance(logging.getLevelName(level), int):
        raise ValueError(f"{source} {word!r} is no level, choose among {', '.join(_LEVELS)}")
    return level


def _require_runtime() -> runtime.Runtime:
    running = runtime.current()
    if running is None:
        raise RuntimeError(
            "this logger has to know the rank: make a PartialState() or Accelerator() before the first message"
        )
    return running


def _flush() -> None:
    """Wait until the notebook has this rank's message, because it reads the ranks' outputs independently."""
    reporter = runtime.reporter()
    if reporter is not None:
        reporter.flush()


complete_names(__name__)
