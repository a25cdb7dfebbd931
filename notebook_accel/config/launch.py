"""A config as the arguments of a launch from a notebook or a script."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, Problem
from . import export, file
from .schema import LaunchConfig

Source = LaunchConfig | str | os.PathLike[str]
"""A config, the path of one, or `default` for the one that lies where all tools look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """What a config says to a launch.

    Attributes:
        values: arguments of `notebook_launcher`.
        environment: variables of the workers.
    """

    values: Mapping[str, Any]
    environment: Mapping[str, str]


def found(source: Source) -> LaunchConfig:
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
    return file.read(path).config


def arguments(config: LaunchConfig, given: Collection[str]) -> Arguments:
    """Return what the config says for arguments that were not given by hand.

    Raises:
        ConfigError: the config is of a run that no launch from here can be.
    """
    if config.compute_environment != "LOCAL_MACHINE":
        text = f"compute_environment {config.compute_environment}: runs are launched on this machine only"
        raise ConfigError([Problem(name="compute_environment", text=text)])
    values: dict[str, Any] = {
        "num_processes": None
        if config.num_processes is None
        else config.num_processes // config.num_machines,
        "mixed_precision": config.mixed_precision,
        "use_port": config.main_process_port,
        "master_addr": config.main_process_ip or "127.0.0.1",
        "node_rank": config.machine_rank,
        "num_nodes": config.num_machines,
        "rdzv_backend": config.rdzv_backend,
        "rdzv_conf": dict(part.split("=", 1) for part in config.rdzv_conf.split(",") if part) or None,
        "max_restarts": config.max_restarts,
        "monitor_interval": config.monitor_interval,
        "log_dir": config.log_dir,
    }
    environment = export.environment(config, file.chosen_names(config))
    environment.pop("ACCELERATE_MIXED_PRECISION", None)  # an argument, as it can be given by hand
    return Arguments(
        values={name: value for name, value in values.items() if name not in given}, environment=environment
    )
