"""Which trackers `log_with` asks for."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import probes
from ..choices import Choice
from .aim import AimTracker
from .base import GeneralTracker
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .runs import SwanLabTracker, TrackioTracker, WandBTracker
from .tensorboard import TensorBoardTracker

_Path = str | os.PathLike[str]
_TrackerClass = Callable[..., GeneralTracker]


class LoggerType(Choice):
    """Trackers by name; `all` stands for those whose library is installed."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


_CLASSES: Final[Mapping[str, type[GeneralTracker]]] = {
    cls.name: cls
    for cls in (
        AimTracker,
        TensorBoardTracker,
        WandBTracker,
        TrackioTracker,
        CometMLTracker,
        MLflowTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
    )
}
_INSTALL: Final[Mapping[str, str]] = {"aim": "'aim<4'"}


def is_installed(kind: LoggerType) -> bool:
    """Return True if the library of a tracker is there: in aim's case, a version below 4."""
    if kind is LoggerType.TENSORBOARD:
        return probes.is_available("tensorboard") or probes.is_available("tensorboardX")
    if kind is LoggerType.AIM:
        return probes.is_available("aim") and not probes.at_least("aim", "4")
    return probes.is_available(kind.value)


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class that `log_with` means by a name; ValueError lists the choices."""
    known = {**_CLASSES, **GeneralTracker._registered}
    if name not in known:
        raise ValueError(
            f"tracker {name!r} is unknown, choose among {', '.join(['all', *known])}; a class of your own is known "
            f"after register_tracker_class in this process"
        )
    return known[name]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` mean this class by its `name`; a class that had the name before gives way, with a warning.

    Raises:
        ValueError: it is no subclass of GeneralTracker, or lacks `name` or `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"register_tracker_class takes a subclass of GeneralTracker, not {tracker_class!r}")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{tracker_class.__name__}.name is {name!r}: it has to be a text")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class.__name__} lacks requires_logging_directory: set it to True or False on the class"
        )
    if name == LoggerType.ALL.value:
        raise ValueError(
            f"{tracker_class.__name__}.name is 'all', which stands for every installed tracker: choose another"
        )
    before = {**_CLASSES, **GeneralTracker._registered}.get(name)
    if before is not None and before is not tracker_class:
        warnings.warn(f"the tracker {name!r} was {before} and is {tracker_class} now", stacklevel=2)
    GeneralTracker._registered = {**GeneralTracker._registered, name: tracker_class}


def choose_trackers(log_with: Any, logging_dir: _Path | None) -> list[str | GeneralTracker]:
    """Return the trackers that `log_with` asks for, each once: names, and instances as they are.

    Args:
        log_with: None, a name, a LoggerType, a tracker, or a list of these. `all` adds those whose library is
            installed, and none is no error then.
        logging_dir: where trackers that write files would.

    Raises:
        TypeError: something else is in the list.
        ValueError: a name is unknown, or its tracker needs a folder and there is none.
        ImportError: a library is not installed.
    """
    asked = list(log_with) if isinstance(log_with, (list, tuple, set, frozenset)) else [log_with]
    chosen: list[str | GeneralTracker] = []
    for entry in asked if log_with is not None else []:
        for tracker in _meant(entry):
            if not any(
                tracker is other or (isinstance(tracker, str) and tracker == other) for other in chosen
            ):
                chosen.append(tracker)
    for tracker in chosen:
        if (
            isinstance(tracker, str)
            and tracker_class(tracker).requires_logging_directory
            and logging_dir is None
        ):
            raise ValueError(
                f"the tracker {tracker!r} writes files: give the Accelerator a project_dir for them"
            )
    return chosen


def _meant(entry: Any) -> list[str | GeneralTracker]:
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
    if name == LoggerType.ALL.value:
        return [kind.value for kind in LoggerType if kind is not LoggerType.ALL and is_installed(kind)]
    if tracker_class(name) is _CLASSES.get(name):
        _require(LoggerType(name))
    return [name]


def _require(kind: LoggerType) -> None:
    if is_installed(kind):
        return
    importlib.invalidate_caches()  # it may have been installed since: a notebook lives long
    probes.is_available.cache_clear()
    if not is_installed(kind):
        raise ImportError(
            f"the tracker {kind.value!r} needs a library that is not installed: "
            f"pip install {_INSTALL.get(kind.value, kind.value)}",
            name=kind.value,
        )
