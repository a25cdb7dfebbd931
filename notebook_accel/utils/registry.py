"""Lists that other code reads by Accelerate's names: the classes of trackers, and the config file of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

from .. import runtime
from ..tracking.base import GeneralTracker
from ..tracking.table import BUILT_IN, LoggerType, installed_names, tracker_class
from .cluster import default_config_file, load_config_from_file

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "cache_dir",
    "default_config_file",
    "do_nothing",
    "get_available_trackers",
    "hf_cache_home",
    "is_initialized",
    "load_config_from_file",
]


class _TrackerClasses(MutableMapping[str, type[GeneralTracker]]):
    """The classes that `register_tracker_class` and assignment make known, and those of this package, which stay."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        if name not in {*BUILT_IN, *GeneralTracker._registered}:
            raise KeyError(name)
        return tracker_class(name)

    def __setitem__(self, name: str, kind: type[GeneralTracker]) -> None:
        if self.get(name) is not kind:
            GeneralTracker._registered = {**GeneralTracker._registered, name: kind}

    def __delitem__(self, name: str) -> None:
        self[name]
        registered = GeneralTracker._registered
        GeneralTracker._registered = {other: kind for other, kind in registered.items() if other != name}

    def __iter__(self) -> Iterator[str]:
        return iter({**BUILT_IN, **GeneralTracker._registered})

    def __len__(self) -> int:
        return len({**BUILT_IN, **GeneralTracker._registered})

    def clear(self) -> None:
        """Forget the classes that were made known."""
        GeneralTracker._registered = {}


LOGGER_TYPE_TO_CLASS: Final = _TrackerClasses()

hf_cache_home: Final = os.path.dirname(os.path.dirname(default_config_file))
cache_dir: Final = os.path.dirname(default_config_file)


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers of Accelerate whose library is installed."""
    return [LoggerType(name) for name in installed_names() if name in LoggerType]


def is_initialized() -> bool:
    """Return True while there is an accelerator."""
    return runtime.is_accelerated()


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Return None."""
