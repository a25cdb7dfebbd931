"""The options of a session: those of the call, and those of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from .. import devices, environ
from ..config import arguments

if TYPE_CHECKING:
    from ..config.launch import Source

_CPU_PROCESSES: Final = 2


def resolve(
    options: Mapping[str, Any], environment: Mapping[str, str] | None, config: Source | None
) -> dict[str, Any]:
    """Return the options of a session.

    Args:
        options: of the call, by the names that they have in `notebook_launcher`.
        environment: variables of the workers, of the call.
        config: supplies the options that the call leaves at their defaults.

    Raises:
        ConfigError: the config is wrong.
        ValueError: only SLURM's sessions have several nodes.
    """
    __tracebackhide__ = True
    found = {**options, "environment": environment}
    if config is not None:
        found |= _read(config, options, environment)
    engine = found["engine"]
    if found["num_nodes"] != 1 and not found["slurm"] and getattr(engine, "name", engine) != "slurm":
        raise ValueError(f"Session: num_nodes={found['num_nodes']!r}: it is for engine='slurm'")
    is_open = (
        found["num_processes"] is None and engine == "auto" and not found["hosts"] and not found["slurm"]
    )
    if is_open and _choose_kind(found["environment"] or {}) is devices.CPU:
        found["num_processes"] = _CPU_PROCESSES
    return found


def _choose_kind(environment: Mapping[str, str]) -> devices.DeviceKind:
    """Return the kind of device of a session with these variables."""
    return devices.best(environ.flag_in(environment, "ACCELERATE_USE_CPU"), environment=environment)


def _read(
    config: Source, options: Mapping[str, Any], environment: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return what a config supplies."""
    __tracebackhide__ = True
    from ..config import launch as by_config

    defaults = arguments.defaults()
    given = {
        name: value
        for name, value in options.items()
        if value is not defaults[name] and value != defaults[name]
    }
    found = by_config.arguments_beside(by_config.find_config(config), given)
    own = {name: value for name, value in found.values.items() if name in options}
    return {
        **own,
        "environment": {**arguments.variables(found.values), **found.environment, **(environment or {})},
    }
