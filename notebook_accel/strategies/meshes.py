"""What sharding needs: a process group, a mesh of the processes, and options of torch."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..combinations import refuse
from ..comm import torch_dist
from ..comm.base import Comm
from ..comm.single import SingleComm
from ..fsdp import FullyShardedDataParallelPlugin
from ..parallelism import ParallelismConfig
from ..precision import PRECISIONS
from ..runtime import Runtime


def ensure_group(runtime: Runtime) -> bool:
    """Open a process group of one process where there is none, and return whether it did."""
    if runtime.topology.world_size > 1 or torch_dist.group_exists():
        return False
    torch_dist.open_group_of_one(runtime.device)
    return True


def for_sharding(runtime: Runtime, strategy: str, parallelism: ParallelismConfig | None, mesh: Any) -> Any:
    """Return the mesh over which fully_shard works: one dimension, or copies and shards; None where nothing is sharded.

    Args:
        runtime: of the process.
        strategy: of sharding, by its name.
        parallelism: the sizes, where they were given.
        mesh: of these sizes.

    Raises:
        ValueError: nodes differ in their number of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh

    device, topology = runtime.device.type, runtime.topology
    if parallelism is not None and (parallelism.dp_shard_enabled or parallelism.cp_enabled):
        names = parallelism.fsdp_dim_names
        if not parallelism.cp_enabled:  # the joint dimension is this one then
            names[-1] = "dp_shard"
        return mesh[tuple(names)]
    if parallelism is not None and parallelism.tp_enabled:
        return None
    if not strategy.startswith("HYBRID"):
        return init_device_mesh(device, (topology.world_size,), mesh_dim_names=("dp_shard",))
    num_nodes, per_node = topology.num_nodes, topology.local_world_size
    if num_nodes * per_node != topology.world_size:
        raise ValueError(
            f"{num_nodes} nodes x {per_node} processes != world {topology.world_size}: {strategy} needs the same "
            "number of processes on each node; or give ParallelismConfig(dp_replicate_size, dp_shard_size)"
        )
    return init_device_mesh(device, (num_nodes, per_node), mesh_dim_names=("dp_replicate", "dp_shard"))


def comm_of_data(runtime: Runtime, parallelism: ParallelismConfig, mesh: Any) -> Comm:
    """Return the collectives of processes that see different batches and have the same part of the model.

    Args:
        runtime: of the process.
        parallelism: the sizes.
        mesh: of these sizes.
    """
    device, debug = runtime.device, runtime.comm.debug
    names = parallelism.dp_dim_names
    if not names:
        return SingleComm(device, debug=debug)
    dimension = mesh[tuple(names)]
    if len(names) > 1:
        dimension = dimension._flatten("dp")  # that of the joint dimension, which exists
    return torch_dist.TorchComm(device, debug=debug, group=dimension.get_group())


def precision_policy(plugin: FullyShardedDataParallelPlugin, mode: str) -> Any:
    """Return torch's policy of mixed precision.

    Args:
        plugin: whose policy counts, where it has one.
        mode: the accelerator's precision: weights compute in it, and gradients are float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = plugin.mixed_precision_policy
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if given is not None:  # of version 1
        return MixedPrecisionPolicy(param_dtype=given.param_dtype, reduce_dtype=given.reduce_dtype)
    dtype = PRECISIONS.get(mode)
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def check_precision(plugin: FullyShardedDataParallelPlugin, mode: str) -> None:
    """Raise ValueError where the plugin's policy and the accelerator compute in different half precisions.

    Args:
        plugin: may have a policy.
        mode: the accelerator's precision.
    """
    policy, wanted = plugin.mixed_precision_policy, PRECISIONS.get(mode)
    given = None if policy is None else policy.param_dtype
    if wanted is not None and given in (torch.float16, torch.bfloat16) and given != wanted:
        raise refuse("precision, policy", f"{mode!r} and param_dtype {given}")


def find_ignored_modules(
    plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module
) -> list[torch.nn.Module]:
    """Return the modules that are not sharded.

    Args:
        plugin: names them, or has a pattern for their names.
        model: has them.

    Raises:
        ValueError: the pattern matches no module.
    """
    given = plugin.ignored_modules
    if given is None:
        return []
    if not isinstance(given, str):
        return list(given)
    pattern = re.compile(given)
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not found:
        raise ValueError(
            f"ignored_modules {given!r} matches the full name of no module of {type(model).__name__}"
        )
    return found
