"""The config file that all tools look for, and a file as it was read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .. import environ
from . import document
from .schema import LaunchConfig, file_values, section_names


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """A config that was read.

    Attributes:
        path: of the file.
        config: what it says.
        ignored: names in it that mean nothing today.
    """

    path: Path
    config: LaunchConfig
    ignored: tuple[str, ...] = ()


def default_path() -> Path:
    """Return where Accelerate's tools and these look for a config that no one names.

    That is `accelerate/default_config.yaml` in $HF_HOME, else in `huggingface` in $XDG_CACHE_HOME, else in
    `~/.cache/huggingface`.
    """
    home = environ.get("HF_HOME")
    if not home:
        cache = environ.get("XDG_CACHE_HOME")
        home = os.path.join(cache or os.path.join("~", ".cache"), "huggingface")
    return document.expand(home) / "accelerate" / "default_config.yaml"


def read(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a file, as `LaunchConfig.read` does.

    Raises:
        ConfigError: lists everything that is wrong, with file and line; nothing of the file is used then.
    """
    found = document.read(path, section_names())
    return ConfigFile(path=found.path, config=LaunchConfig.of_document(found), ignored=found.ignored)


def as_yaml(config: LaunchConfig) -> str:
    """Return what `LaunchConfig.write` would write to a new file."""
    return document.as_yaml(file_values(config))
