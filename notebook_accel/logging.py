"""get_logger: a logger that knows the ranks."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from . import environ, runtime

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # takes no type before Python 3.11

_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


class MultiProcessAdapter(_Adapter):
    """Logs in rank 0, in all ranks, or in all ranks one after the other.

    Every method that logs takes two keywords more:

    - `main_process_only`: False logs in all ranks; True is the default.
    - `in_order`: True logs in all ranks in the order of rank, each after the one before. All ranks have to make
      the call, at a level that is on in all of them or none: they wait for each other.

    Messages start with the rank. RuntimeError before there is a `PartialState` or `Accelerator`.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[str] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with the rank before it."""
        msg, kwargs = super().process(msg, kwargs)
        return f"[RANK {_running().topology.rank}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log in the ranks that the keywords choose."""
        running = _running()
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = (
            kwargs.get("stacklevel", 1) + 1
        )  # this method is not where the message comes from
        msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        if not in_order:
            if running.topology.is_main or not main_process_only:
                self.logger.log(level, msg, *args, **kwargs)
            return
        for rank in range(running.topology.world_size):
            if rank == running.topology.rank:
                self.logger.log(level, msg, *args, **kwargs)
                _deliver()
            running.comm.barrier()

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this logger has warned with the same arguments before."""
        key = repr((msg, args, sorted(kwargs.items())))
        if key not in self._warned:
            self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
            self._warned.add(key)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return the logger of a name, for a run of any number of processes.

    Args:
        name: as for `logging.getLogger`.
        log_level: level of this logger and of the root logger, as a word in any case; by default
            ACCELERATE_LOG_LEVEL, and where that is not set levels stay as they are.

    Raises:
        ValueError: there is no such level.
    """
    chosen = environ.get("ACCELERATE_LOG_LEVEL") if log_level is None else log_level
    logger = logging.getLogger(name)
    if chosen:
        level = _known_level(chosen, "log_level" if log_level is not None else "ACCELERATE_LOG_LEVEL")
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})


def _known_level(word: str, source: str) -> str:
    level = str(word).upper()
    if not isinstance(logging.getLevelName(level), int):
        raise ValueError(f"{source} {word!r} is no level, choose among {', '.join(_LEVELS)}")
    return level


def _running() -> runtime.Runtime:
    running = runtime.current()
    if running is None:
        raise RuntimeError(
            "this logger has to know the rank: make a PartialState() or Accelerator() before the first message"
        )
    return running


def _deliver() -> None:
    """Wait until the notebook has this rank's message: it reads each rank's output by itself."""
    reporter = runtime.reporter()
    if reporter is not None:
        reporter.flush()
