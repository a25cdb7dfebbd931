"""A config for this machine: no question is asked, and no device is initialised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import devices
from ..errors import ConfigError, Problem

if TYPE_CHECKING:  # the schema is imported by the first call: the function is at hand in every process
    from .schema import LaunchConfig

_LIBRARIES: Final = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def fitting_types(*, use_cpu: bool = False) -> tuple[str, ...]:
    """Return the distributed types that this machine can run, without initialising a device.

    Args:
        use_cpu: leave accelerators alone.
    """
    kind = devices.CPU if use_cpu else devices.best()
    if kind in (devices.CPU, devices.MPS):
        return ("NO", kind.distributed_type)
    return ("NO", kind.distributed_type, *(_LIBRARIES if kind is not devices.XLA else ()))


def detect(**options: Any) -> LaunchConfig:
    """Return a config for the devices of this machine, without initialising one.

    Args:
        options: count more than what was found. By default there is a process for each device of each node.

    Raises:
        ConfigError: an option has a wrong value, or ACCELERATE_TORCH_DEVICE names a device that is not here.
    """
    from .schema import LaunchConfig

    given = LaunchConfig.model_validate(options)
    kind = devices.CPU if given.use_cpu else devices.best()
    if absence := devices.find_absence(kind):
        raise ConfigError([Problem(name="", text=absence)])
    alone = "distributed_type" in options and given.distributed_type == "NO"
    number = given.num_processes or (1 if alone else devices.count_usable(kind)) * given.num_machines
    found: dict[str, Any] = {"num_processes": number, "use_cpu": kind is devices.CPU}
    if number > 1:
        found["distributed_type"] = kind.distributed_type
    return LaunchConfig.model_validate({**found, **options})


def write_basic_config(
    mixed_precision: str = "no",
    save_location: str | os.PathLike[str] | None = None,
    use_xpu: bool = False,
    *,
    overwrite: bool = False,
) -> Path | None:
    """Write a config for the devices of this machine, which `notebook_launcher(config="default")` and launches use.

    No device is initialised: a launch from the next cell is as clean as without it.

    Args:
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`.
        save_location: path of the file, which ends in .yaml, .yml or .json; None is the default config file.
        use_xpu: has no effect: Intel GPUs are found without it.
        overwrite: replace a file that is there.

    Returns:
        The file's path; None where a file is there already: it stays, and a line says so.

    Raises:
        ConfigError: the precision is wrong, `save_location` is no name of a config file, or ACCELERATE_TORCH_DEVICE
            names a device that is not here.
    """
    from . import document, file

    path = document.expand(save_location) if save_location is not None else file.default_path()
    config = detect(mixed_precision=mixed_precision)
    if path.is_dir():
        raise ConfigError(
            [
                Problem(
                    name="", text=f"{path} is a folder: name a file, such as {path / 'default_config.yaml'}"
                )
            ]
        )
    if path.exists() and not overwrite:
        print(f"{path} is there already and was left as it is: overwrite=True replaces it")
        return None
    return config.write(path, replace=True)
