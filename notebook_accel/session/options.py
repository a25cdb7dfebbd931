"""The options of a session that a config has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import arguments

if TYPE_CHECKING:
    from ..config.launch import Source


def resolve(options: Mapping[str, Any], config: Source | None) -> dict[str, Any]:
    """Return the options of a session with those of its config.

    Raises:
        ValueError: only SLURM's sessions have several nodes.
    """
    __tracebackhide__ = True
    engine = options["engine"]
    if options["num_nodes"] != 1 and not options["slurm"] and getattr(engine, "name", engine) != "slurm":
        raise ValueError(f"Session: num_nodes={options['num_nodes']!r}: it is for engine='slurm'")
    return dict(options) if config is None else apply_config(options, config)


def apply_config(options: Mapping[str, Any], config: Source) -> dict[str, Any]:
    """Return the options. A config supplies those that the call does not have."""
    __tracebackhide__ = True
    from ..config import launch as by_config

    names = ("num_processes", "mixed_precision")
    given = [name for name in names if options[name] != arguments.defaults()[name]]
    found = by_config.arguments(by_config.find_config(config), given)
    if found.values.get("num_nodes", 1) != 1:
        raise ValueError(f"config names {found.values['num_nodes']} nodes: a session runs on one node")
    own = {name: found.values[name] for name in names if name in found.values}
    environment = {**arguments.variables(found.values), **found.environment}
    return {**options, **own, "environment": {**environment, **(options["environment"] or {})}}
