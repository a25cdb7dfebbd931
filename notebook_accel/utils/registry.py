"""Lists that other code reads by Accelerate's names: the classes of trackers, and the config file of this machine."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any, Final

from .. import runtime
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

LOGGER_TYPE_TO_CLASS: Final = MappingProxyType({name: tracker_class(name) for name in BUILT_IN})
"""Classes of the trackers of this package; others are made known by `register_tracker_class`, and are not in it."""

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
