"""Lists that other code reads by Accelerate's names: the classes of trackers, and the config file of this machine."""

from __future__ import annotations

import errno
import os
from types import MappingProxyType
from typing import Any, Final

from .. import runtime
from ..config import document, file
from ..config.schema import LaunchConfig, file_values
from ..tracking.table import BUILT_IN, LoggerType, installed_names, tracker_class

LOGGER_TYPE_TO_CLASS: Final = MappingProxyType({name: tracker_class(name) for name in BUILT_IN})
"""Classes of the trackers of this package; others are made known by `register_tracker_class`, and are not in it."""

default_config_file: Final = str(file.default_path())
hf_cache_home: Final = os.path.dirname(os.path.dirname(default_config_file))
cache_dir: Final = os.path.dirname(default_config_file)


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers of Accelerate whose library is installed."""
    return [LoggerType(name) for name in installed_names() if name in LoggerType]


class _ReadConfig(LaunchConfig):
    """A config with the method by which Accelerate's users read it."""

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a file would hold them."""
        return file_values(self)


def load_config_from_file(config_file: str | os.PathLike[str] | None = None) -> LaunchConfig:
    """Return the config in a file; `to_dict` is what a file would hold.

    Args:
        config_file: by default the one that all tools look for.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: something in it is wrong.
    """
    path = document.expand(default_config_file if config_file is None else config_file)
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    found = file.read(path).config
    return _ReadConfig.model_construct(_fields_set=set(found.model_fields_set), **dict(found))


def is_initialized() -> bool:
    """Return True while there is an accelerator."""
    return runtime.is_accelerated()


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Return None."""
