"""Translates a config into the arguments of `notebook_launcher`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, Problem
from . import export, file
from .arguments import of_configs as argument_options
from .schema import LaunchConfig, chosen_names, flat_values

Source = LaunchConfig | str | os.PathLike[str]
"""A config, the path of a config file, or `default` for the default config file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """What a config says to a launch.

    Attributes:
        values: arguments of `notebook_launcher`.
        environment: variables of the workers.
    """

    values: Mapping[str, Any]
    environment: Mapping[str, str]


def find_config(source: Source) -> LaunchConfig:
    """Return the config that a source names.

    Raises:
        ConfigError: it cannot be read, or is wrong.
        TypeError: it is none of a config, a path and `default`.
    """
    if isinstance(source, LaunchConfig):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"config is a {type(source).__name__}: give None, 'default', the path of a file, or a LaunchConfig"
        )
    path = file.default_path() if source == "default" else source
    if source == "default" and not os.path.exists(path):
        text = f"there is no default config at {path}: write_basic_config() writes one"
        raise ConfigError([Problem(name="", text=text)])
    return LaunchConfig.read(path)


def arguments(config: LaunchConfig, given: Collection[str]) -> Arguments:
    """Return what a config says to a launch.

    Args:
        config: all options.
        given: names of the arguments that were given by hand, which count more.

    Returns:
        The arguments that differ from their default, and the variables of the workers.

    Raises:
        ConfigError: the config is of a run that no launch from here can be.
    """
    if config.compute_environment != "LOCAL_MACHINE":
        text = f"compute_environment {config.compute_environment}: runs are launched on this machine only"
        raise ConfigError([Problem(name="compute_environment", text=text)])
    flat, options = flat_values(config), argument_options()
    environment = export.environment(config, chosen_names(config))
    for option in options.values():
        environment.pop(option.face.env or "", None)  # an argument says it, which can be given by hand
    values = {
        name: value
        for name, value in _convert(flat).items()
        if name not in given and value != options[name].argument_default
    }
    return Arguments(values=values, environment=environment)


def _convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments but the variables of workers, for the values of all options by name."""
    values: dict[str, Any] = {}
    for name, option in argument_options().items():
        convert = None if option.row.argument is None else option.row.argument.convert
        values[name] = flat[option.name] if convert is None else convert(flat[option.name], flat)
    del values["environment"]
    return values
