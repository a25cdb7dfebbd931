"""Pieces of sharding by hand, for code that does not go through `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..accelerator import Accelerator
from ..strategies.filling import load_first


def fsdp2_prepare_model(accelerator: Accelerator, model: torch.nn.Module) -> Any:
    """Return the model sharded as the accelerator's plugin says, the same object.

    ValueError if the accelerator does not shard.
    """
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"this accelerator does not shard models ({accelerator.distributed_type}): give it a fsdp_plugin"
        )
    return accelerator.prepare_model(model)


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: torch.nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Give a sharded model the values of rank 0's `full_sd`; each process receives its part alone.

    Args:
        accelerator: of the run.
        model: sharded, in memory or on the meta device.
        full_sd: all of the model's state, on rank 0; not looked at elsewhere.
        cpu_offload: a model on the meta device gets its memory on the CPU.

    Raises:
        ValueError: names or shapes are not those of the model, on all processes.
    """
    device = torch.device("cpu") if cpu_offload else accelerator.device
    load_first(model, full_sd, accelerator._runtime.comm, lambda tensor: device)


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[int, torch.nn.Parameter]
) -> None:
    """Replace the optimizer's parameters by those that the mapping has for the addresses of their data.

    KeyError if it has none for one of them; then nothing is changed.
    """

    def switched(parameter: Any) -> torch.nn.Parameter:
        address = parameter.data_ptr() if callable(parameter.data_ptr) else parameter.data_ptr
        if address not in mapping:
            raise KeyError(
                f"the mapping has no parameter for the optimizer's of shape {list(parameter.shape)}: training would "
                "not change it"
            )
        return mapping[address]

    groups = [[switched(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
