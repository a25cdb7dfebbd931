"""Distributed PyTorch from a notebook cell."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .accelerator import Accelerator
from .checkpointing.shards import load_checkpoint_in_model
from .config.basic import write_basic_config
from .data_loader import DataLoaderConfiguration, skip_first_batches
from .errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    DeviceGuardError,
    LaunchError,
    NotebookAccelError,
    RunStoppedError,
    ShipError,
    WorkerError,
    WorkerExitedError,
    WorkerKilledError,
)
from .handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from .inference import prepare_pippy
from .launchers import debug_launcher, notebook_launcher, runs
from .memory import find_executable_batch_size
from .metrics import print_metrics
from .probes import is_rich_available
from .seeding import synchronize_rng_states
from .state import DistributedType, PartialState

if TYPE_CHECKING:
    from .config.schema import LaunchConfig

if not (Path(__file__).parent / "widgets").is_dir():  # in the source tree, where it lies beside this folder
    __path__.append(str(Path(__file__).parents[1]))

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeviceGuardError",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "LaunchConfig",
    "LaunchError",
    "NotebookAccelError",
    "PartialState",
    "ProfileKwargs",
    "RunStoppedError",
    "ShipError",
    "WorkerError",
    "WorkerExitedError",
    "WorkerKilledError",
    "debug_launcher",
    "find_executable_batch_size",
    "is_rich_available",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "print_metrics",
    "runs",
    "skip_first_batches",
    "synchronize_rng_states",
    "write_basic_config",
]


def __getattr__(name: str) -> Any:
    """Import what only some processes need when it is asked for."""
    if name == "LaunchConfig":
        from .config.schema import LaunchConfig

        return LaunchConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the magics, by `%load_ext notebook_accel`."""
    from .widgets.magics import register

    register(shell)
