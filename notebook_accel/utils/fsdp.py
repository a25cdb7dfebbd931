"""Shards models by hand, for code that does not use `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..accelerator import Accelerator
from ..compilation import plain_name
from ..strategies.filling import load_first


def fsdp2_prepare_model(accelerator: Accelerator, model: torch.nn.Module) -> Any:
    """Shard a model as the accelerator's plugin says, in place.

    Args:
        accelerator: with an FSDP plugin.
        model: to be sharded.

    Returns:
        The model.

    Raises:
        ValueError: the accelerator does not shard.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"this accelerator does not shard models ({accelerator.distributed_type.value}): give it a fsdp_plugin"
        )
    return accelerator.prepare_model(model)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: torch.nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Give a sharded model the values of rank 0's `full_sd`; each process receives its part alone.

    Args:
        accelerator: of the run.
        model: sharded, in memory or on the meta device.
        full_sd: all of the model's state, on rank 0; other ranks ignore it.
        cpu_offload: a model on the meta device gets its memory on the CPU.

    Raises:
        ValueError: names or shapes are not those of the model, on all processes.
    """
    device = torch.device("cpu") if cpu_offload else accelerator.device
    load_first(model, full_sd, accelerator._runtime.comm, lambda tensor: device)


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[int, torch.nn.Parameter]
) -> None:
    """Replace an optimizer's parameters by others.

    Args:
        optimizer: the optimizer.
        mapping: the new parameters, by the addresses of the old parameters' data.

    Raises:
        KeyError: the mapping lacks a parameter; then nothing changes.
    """

    def find_replacement(parameter: Any) -> torch.nn.Parameter:
        address = parameter.data_ptr() if callable(parameter.data_ptr) else parameter.data_ptr
        if address not in mapping:
            raise KeyError(
                f"the mapping has no parameter for the optimizer's of shape {list(parameter.shape)}: training would "
                "not change it"
            )
        return mapping[address]

    groups = [
        [find_replacement(parameter) for parameter in group["params"]] for group in optimizer.param_groups
    ]
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters


def ensure_weights_retied(
    param_init_fn: Callable[[torch.nn.Module], torch.nn.Module], model: torch.nn.Module, device: torch.device
) -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Return a function that gives values to modules as another does, and lets weights that were one be one again.

    Args:
        param_init_fn: gives a module its values, and returns it.
        model: of Transformers, whose `_tied_weights_keys` names the weights.
        device: accepted and not needed.
    """
    names = getattr(model, "_tied_weights_keys", None)
    if not names:
        return param_init_fn
    first: dict[int, torch.nn.Parameter | None] = {id(model.get_parameter(name)): None for name in names}

    def make(module: torch.nn.Module) -> torch.nn.Module:
        shared = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        made = param_init_fn(module)
        for name, key in shared.items():
            if key in first and (known := first[key]) is not None:
                setattr(made, name, known)
            elif key in first:
                first[key] = getattr(made, name)
        return made

    return make


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by the names that they have without wrappers for compiling and for recomputing activations.

    Args:
        named_params: by names of a wrapped model.
    """
    return {_remove_wrappers(name): parameter for name, parameter in named_params.items()}


def _remove_wrappers(name: str) -> str:
    return plain_name(".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module"))


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler of torch.

    Args:
        kwargs: its arguments.
    """
    return torch.amp.GradScaler(**kwargs)
