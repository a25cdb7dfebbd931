"""Translates a config into the arguments of `notebook_launcher`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..caller import warn
from ..errors import ConfigError, Problem
from . import export, file
from .argument_checks import parse_engine
from .arguments import IMPLIED
from .arguments import of_configs as argument_options
from .schema import LaunchConfig, chosen_names, flat_values

OF_ENGINES: Final = ("address", "hosts", "python", "slurm", "detach")
"""Arguments that other engines refuse than those that they are for."""
_OF_NODES: Final = ("num_nodes", "node_rank", "master_addr", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
_IDLE: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "ssh": (_OF_NODES, "hosts says which machines"),
    "slurm": ((*_OF_NODES[1:], "rdzv_conf"), "SLURM says which node is which"),
}
"""By engines that start the ranks of all nodes: what each node's own launch has an argument for, and who says it."""
_AUTO: Final = "auto"

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


def arguments_beside(config: LaunchConfig, given: Mapping[str, Any]) -> Arguments:
    """Return what a config says to a launch with arguments of its own.

    What the config has for other engines is left out with a warning: one config serves several.

    Args:
        config: all options.
        given: the arguments that were given by hand, which count more.

    Raises:
        ConfigError: the config is of a run that no launch from here can be.
    """
    found = arguments(config, given)
    idle = find_idle({**found.values, **given}, given)
    for name, text in idle.items():
        warn(f"{name} of the config {text}")
    values = {name: value for name, value in found.values.items() if name not in idle}
    if "num_nodes" in idle and "num_processes" in values:
        values["num_processes"] = config.num_processes  # of all nodes together, and not of each
    return replace(found, values=values)


def find_idle(values: Mapping[str, Any], given: Collection[str]) -> dict[str, str]:
    """Return the arguments of a config that are for other engines than the launch has, each with why as a clause.

    Args:
        values: arguments by name; those of the config that have their default may be left out.
        given: names of those that were given by hand.
    """
    asked = values.get("engine", _AUTO)
    engine = getattr(asked, "name", asked)
    if engine == _AUTO:
        named = [name for name in IMPLIED if values.get(name)]
        implied = [name for name in named if name in given] or named
        engine = IMPLIED[implied[0]] if implied else _AUTO
    else:
        engine = parse_engine(engine)
    found = {}
    for name in OF_ENGINES:
        engines = argument_options()[name].row.engines
        if values.get(name) and name not in given and engine not in engines:
            known = " and ".join(f"engine={each!r}" for each in engines)
            found[name] = f"has no effect: it is for {known}, and this launch has engine={engine!r}"
    names, who = _IDLE.get(str(engine), ((), ""))
    for name in names:
        default = argument_options()[name].argument_default
        if name not in given and values.get(name, default) != default:
            found[name] = f"has no effect: {who}"
    return found


def _convert(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments but the variables of workers, for the values of all options by name."""
    values: dict[str, Any] = {}
    for name, option in argument_options().items():
        convert = None if option.row.argument is None else option.row.argument.convert
        values[name] = flat[option.name] if convert is None else convert(flat[option.name], flat)
    del values["environment"]
    return values
