"""Files of sharded models and optimizers, for code that does not use `save_state`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..accelerator import Accelerator
from ..checkpointing import plain, sharded
from ..fsdp import FullyShardedDataParallelPlugin
from .constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from .modeling import is_peft_model

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a model to a folder; every process calls it.

    Args:
        fsdp_plugin: its `state_dict_type` chooses one file with all weights, or a folder with a file of each process.
        accelerator: has prepared the model.
        model: prepared.
        output_dir: the folder; it is made where there is none.
        model_index: number of the model, part of the name.
        adapter_only: of a PEFT model, write only the parameters that are trained; of others everything is written.
        use_dcp: True; files that fit one number of processes alone are not written.

    Raises:
        NotImplementedError: `use_dcp` is False.
        CheckpointError: on all ranks, where one cannot write its part of a sharded folder.
    """
    trained_only = adapter_only and _is_peft_model(accelerator, model)
    options = _make_options(fsdp_plugin, use_dcp, ignore_frozen_params=trained_only)
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(model, options=options)
    name = f"{FSDP_MODEL_NAME}.bin" if model_index == 0 else f"{FSDP_MODEL_NAME}_{model_index}.bin"
    folder = f"{FSDP_MODEL_NAME}_{model_index}"
    _write(fsdp_plugin, accelerator, "model", state, Path(output_dir), name, folder)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote; every process calls it.

    Args:
        fsdp_plugin: as when it was written.
        accelerator: of the run.
        model: prepared.
        input_dir: the folder.
        model_index: number of the model.
        adapter_only: the files of a PEFT model have only the parameters that are trained.
        use_dcp: see `save_fsdp_model`.

    Returns:
        The names that are missing and those that are unknown, as of `load_state_dict`.

    Raises:
        NotImplementedError: `use_dcp` is False.
    """
    from torch.distributed.checkpoint import state_dict as states

    accelerator.wait_for_everyone()
    trained_only = adapter_only and _is_peft_model(accelerator, model)
    options = _make_options(fsdp_plugin, use_dcp, ignore_frozen_params=trained_only, strict=not trained_only)
    name = f"{FSDP_MODEL_NAME}.bin" if model_index == 0 else f"{FSDP_MODEL_NAME}_{model_index}.bin"
    if fsdp_plugin.saves_shards:
        target = {"model": states.get_model_state_dict(model, options=options)}
        state = _read_shards(target, Path(input_dir), f"{FSDP_MODEL_NAME}_{model_index}")["model"]
    else:
        state = _read_whole(accelerator, Path(input_dir, name))
    result = states.set_model_state_dict(model, state, options=options)
    accelerator.wait_for_everyone()
    return result


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write an optimizer's state to a folder; every process calls it.

    Args:
        fsdp_plugin: see `save_fsdp_model`.
        accelerator: of the run.
        optimizer: prepared or not.
        model: whose parameters it has.
        output_dir: the folder; it is made where there is none.
        optimizer_index: number of the optimizer, part of the name.
        use_dcp: see `save_fsdp_model`.

    Raises:
        NotImplementedError: `use_dcp` is False.
        CheckpointError: see `save_fsdp_model`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    options = _make_options(fsdp_plugin, use_dcp)
    state = get_optimizer_state_dict(model, _find_torchs(optimizer), options=options)
    name = f"{OPTIMIZER_NAME}.bin" if optimizer_index == 0 else f"{OPTIMIZER_NAME}_{optimizer_index}.bin"
    folder = f"{OPTIMIZER_NAME}_{optimizer_index}"
    _write(fsdp_plugin, accelerator, "optimizer", state, Path(output_dir), name, folder)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote; every process calls it.

    Args:
        fsdp_plugin: as when it was written.
        accelerator: of the run.
        optimizer: prepared or not.
        model: whose parameters it has.
        input_dir: the folder.
        optimizer_index: number of the optimizer.
        adapter_only: has no effect.
        use_dcp: see `save_fsdp_model`.

    Raises:
        NotImplementedError: `use_dcp` is False.
    """
    from torch.distributed.checkpoint import state_dict as states

    accelerator.wait_for_everyone()
    options = _make_options(fsdp_plugin, use_dcp)
    own = _find_torchs(optimizer)
    name = f"{OPTIMIZER_NAME}.bin" if optimizer_index == 0 else f"{OPTIMIZER_NAME}_{optimizer_index}.bin"
    if fsdp_plugin.saves_shards:
        target = {"optimizer": states.get_optimizer_state_dict(model, own, options=options)}
        state = _read_shards(target, Path(input_dir), f"{OPTIMIZER_NAME}_{optimizer_index}")["optimizer"]
    else:
        state = _read_whole(accelerator, Path(input_dir, name))
        if not _has_tensors(states.get_optimizer_state_dict(model, own)):
            # torch sends tensors of rank 0 to the others, and refuses where there are none
            state, options = accelerator._runtime.comm.broadcast_object(state), None
    states.set_optimizer_state_dict(model, own, optim_state_dict=state, options=options)
    accelerator.wait_for_everyone()


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of some modules.

    Args:
        modules: the modules, or a pattern that fits their names in the model; these are moved to the device.
        model: has the modules.
        device: where they go.
    """
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module.to(device) for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules or () for parameter in module.parameters()}


def _make_options(plugin: FullyShardedDataParallelPlugin, use_dcp: bool, **more: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    if not use_dcp:
        raise NotImplementedError(
            "use_dcp=False writes files that fit one number of processes: leave it out, and any number can read them"
        )
    whole = not plugin.saves_shards
    return StateDictOptions(full_state_dict=whole, cpu_offload=whole, broadcast_from_rank0=whole, **more)


def _is_peft_model(accelerator: Accelerator, model: nn.Module) -> bool:
    return is_peft_model(accelerator.unwrap_model(model, keep_torch_compile=False))


def _find_torchs(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _has_tensors(state: Any) -> bool:
    """Return whether an optimizer has more than settings: SGD without momentum has not."""
    return any(isinstance(value, torch.Tensor) for own in state["state"].values() for value in own.values())


def _write(
    plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    what: str,
    state: Any,
    where: Path,
    name: str,
    folder: str,
) -> None:
    accelerator.wait_for_everyone()  # who looks for the folder first, as Trainer does, finds the same on all ranks
    where.mkdir(parents=True, exist_ok=True)
    if plugin.saves_shards:
        (where / folder).mkdir(exist_ok=True)
        sharded.save({what: state}, where / folder)
    elif accelerator.is_main_process:  # the others, on each node, have nothing of it
        plain.write(state, where / name)


def _read_shards(target: dict[str, Any], where: Path, folder: str) -> dict[str, Any]:
    from torch.distributed import checkpoint

    place = where if where.name == folder else where / folder
    checkpoint.load(target, storage_reader=checkpoint.FileSystemReader(place))
    return target


def _read_whole(accelerator: Accelerator, path: Path) -> Any:
    """Return what the file holds in rank 0, from which the others get it."""
    if not accelerator.is_main_process and accelerator.is_fsdp2:
        return {}
    return torch.load(path, weights_only=True, map_location="cpu")
