"""Which trackers `log_with` asks for."""

from __future__ import annotations

import importlib
import os
from typing import Any

from .. import probes
from ..caller import warn
from . import table
from .base import GeneralTracker, check_tracker_class
from .table import tracker_class


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` mean this class by its `name`, in this process.

    A class that had the name before gives way, with a warning.

    Args:
        tracker_class: a subclass of GeneralTracker that sets `name` and `requires_logging_directory`.

    Raises:
        ValueError: it is no subclass of GeneralTracker, or lacks `name` or `requires_logging_directory`.
    """
    kind = check_tracker_class(tracker_class)
    is_known = kind.name in GeneralTracker._registered or kind.name in table.BUILT_IN
    before = table.tracker_class(kind.name) if is_known else None
    if before is not None and before is not kind:
        warn(f"the tracker {kind.name!r} was {before} and is {kind} now")
    GeneralTracker._registered = {**GeneralTracker._registered, kind.name: kind}


def choose_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[str | GeneralTracker]:
    """Return the trackers that `log_with` asks for, each once: names, and instances as they are.

    Args:
        log_with: None, a name, a LoggerType, a tracker, or a list of these. `all` adds every tracker that is
            installed; it is no error if there is none.
        logging_dir: the folder of trackers that write files.

    Returns:
        Names of trackers whose library is installed, and the instances of `log_with`.

    Raises:
        TypeError: something else is in the list.
        ValueError: a name is unknown, what a package offers under it cannot be used, or its tracker writes files
            and `logging_dir` is None.
        ImportError: a library is not installed.
    """
    asked = list(log_with) if isinstance(log_with, (list, tuple, set, frozenset)) else [log_with]
    chosen: list[str | GeneralTracker] = []
    for entry in asked if log_with is not None else []:
        for tracker in _resolve(entry):
            if not any(
                tracker is other or (isinstance(tracker, str) and tracker == other) for other in chosen
            ):
                chosen.append(tracker)
    for tracker in chosen:
        if (
            isinstance(tracker, str)
            and logging_dir is None
            and tracker_class(tracker).requires_logging_directory
        ):
            raise ValueError(
                f"the tracker {tracker!r} writes files: give the Accelerator a project_dir for them"
            )
    return chosen


def _resolve(entry: Any) -> list[str | GeneralTracker]:
    """Return the trackers that one entry of `log_with` stands for."""
    if isinstance(entry, GeneralTracker):
        return [entry]
    if not isinstance(entry, str):
        hint = (
            " (make an instance of the class, or register it and give its name)"
            if isinstance(entry, type)
            else ""
        )
        raise TypeError(f"log_with takes names, LoggerType members and trackers, not {entry!r}{hint}")
    name = str(entry)
    if name == table.ALL:
        return [tracker for tracker in table.installed_names() if _is_usable(tracker)]
    tracker_class(name)
    if name in table.BUILT_IN and name not in GeneralTracker._registered:
        _require_library(name, table.BUILT_IN[name])
    return [name]


def _is_usable(name: str) -> bool:
    """Return whether a tracker has a class; warn where what a package offers is none."""
    try:
        tracker_class(name)
    except ValueError as error:
        warn(f"log_with='all' leaves one out: {error}")
        return False
    return True


def _require_library(name: str, adapter: table.Adapter) -> None:
    if adapter.is_installed:
        return
    importlib.invalidate_caches()  # it may have been installed since: a notebook lives long
    probes.is_available.cache_clear()
    if not adapter.is_installed:
        raise ImportError(
            f"the tracker {name!r} needs a library that is not installed: pip install {adapter.requirement}",
            name=adapter.libraries[0],
        )
