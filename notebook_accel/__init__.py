"""Distributed PyTorch from a notebook cell.

The modules of the public names are imported when one of them is asked for: the command answers without torch, and
libraries that this package serves as Accelerate wait for the modules that they use alone.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if sys.platform == "win32":
    raise ImportError("notebook_accel is for Linux and macOS; on Windows, use it in WSL 2")

from . import collector, environ, requirements

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .big_modeling import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from .config.basic import write_basic_config
    from .config.schema import LaunchConfig
    from .data_loader import DataLoaderConfiguration, skip_first_batches
    from .deepspeed.plugin import DeepSpeedPlugin
    from .errors import (
        CheckpointError,
        CollectiveError,
        ConfigError,
        DeviceGuardError,
        HangError,
        LaunchError,
        NotebookAccelError,
        RunLeftError,
        RunStoppedError,
        SessionError,
        ShipError,
        WorkerError,
        WorkerExitedError,
        WorkerKilledError,
    )
    from .fsdp import FullyShardedDataParallelPlugin
    from .handlers import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from .inference import prepare_pippy
    from .launchers import attach, debug_launcher, notebook_launcher, runs
    from .memory import find_executable_batch_size
    from .metrics import print_metrics
    from .parallelism import ParallelismConfig
    from .probes import is_rich_available
    from .seeding import synchronize_rng_states
    from .session import Session, current_session
    from .state import DistributedType, PartialState
    from .takeover import take_over_accelerate

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
    "DeepSpeedPlugin",
    "DeviceGuardError",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "HangError",
    "InitProcessGroupKwargs",
    "LaunchConfig",
    "LaunchError",
    "NotebookAccelError",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "RunLeftError",
    "RunStoppedError",
    "Session",
    "SessionError",
    "ShipError",
    "WorkerError",
    "WorkerExitedError",
    "WorkerKilledError",
    "attach",
    "cpu_offload",
    "cpu_offload_with_hook",
    "current_session",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_pippy",
    "print_metrics",
    "runs",
    "skip_first_batches",
    "synchronize_rng_states",
    "take_over_accelerate",
    "write_basic_config",
]

_HOMES: Final = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "handlers",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "ConfigError": "errors",
    "DDPCommunicationHookType": "handlers",
    "DataLoaderConfiguration": "data_loader",
    "DeepSpeedPlugin": "deepspeed.plugin",
    "DeviceGuardError": "errors",
    "DistributedDataParallelKwargs": "handlers",
    "DistributedType": "state",
    "FullyShardedDataParallelPlugin": "fsdp",
    "GradScalerKwargs": "handlers",
    "InitProcessGroupKwargs": "handlers",
    "HangError": "errors",
    "LaunchConfig": "config.schema",
    "LaunchError": "errors",
    "NotebookAccelError": "errors",
    "ParallelismConfig": "parallelism",
    "PartialState": "state",
    "ProfileKwargs": "handlers",
    "RunLeftError": "errors",
    "RunStoppedError": "errors",
    "Session": "session",
    "SessionError": "errors",
    "ShipError": "errors",
    "WorkerError": "errors",
    "WorkerExitedError": "errors",
    "WorkerKilledError": "errors",
    "attach": "launchers",
    "cpu_offload": "big_modeling",
    "cpu_offload_with_hook": "big_modeling",
    "current_session": "session",
    "debug_launcher": "launchers",
    "disk_offload": "big_modeling",
    "dispatch_model": "big_modeling",
    "find_executable_batch_size": "memory",
    "infer_auto_device_map": "big_modeling",
    "init_empty_weights": "big_modeling",
    "init_on_device": "big_modeling",
    "is_rich_available": "probes",
    "load_checkpoint_and_dispatch": "big_modeling",
    "load_checkpoint_in_model": "big_modeling",
    "notebook_launcher": "launchers",
    "prepare_pippy": "inference",
    "print_metrics": "metrics",
    "runs": "launchers",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "seeding",
    "take_over_accelerate": "takeover",
    "write_basic_config": "config.basic",
}
"""Public names, each with the module that has it."""

_LIGHT: Final = ("config.basic", "config.schema", "errors", "launchers", "probes", "takeover")
"""Modules that import little: where torch is there, to ask for one of their names imports no others."""

_LATER: Final = ("cloudpickle", "numpy", "psutil", "pydantic", "safetensors", "tqdm")
"""Libraries that their functions import."""


def _import_all() -> None:
    """Import what the public names need, all at once: a worker that is a fork then has it."""
    with collector.pause(), requirements.explain_missing():
        for home in dict.fromkeys(_HOMES.values()):
            if home != "config.schema":  # workers need none of it
                importlib.import_module(f".{home}", __name__)


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is asked for."""
    if name in _HOMES:
        needs_torch = name not in ("LaunchConfig", "take_over_accelerate")
        if needs_torch and _HOMES[name] in _LIGHT and "torch" in sys.modules:
            requirements.require(_LATER)
        elif needs_torch:
            _import_all()
        with requirements.explain_missing():
            return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if not name.startswith("_") and importlib.util.find_spec(f".{name}", __name__) is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the magics, by `%load_ext notebook_accel`.

    Raises:
        ImportError: required libraries are missing; the message has the command that installs them.
    """
    with requirements.explain_missing():
        from .widgets.magics import register

    register(shell)


if "torch" in sys.modules:
    importlib.import_module(".launch.checks.cuda_use", __name__).record()

if "IPython" in sys.modules:
    with requirements.explain_missing():
        importlib.import_module(".launch.agent.background", __name__).watch_cells()

if environ.flag("NOTEBOOK_ACCEL_AS_ACCELERATE"):
    importlib.import_module(".takeover.finder", __name__).install()
