"""The blocks of a model: which modules FSDP shards each on its own, and what happens around each forward."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .. import devices, probes
from ..caller import warn
from ..fsdp import FullyShardedDataParallelPlugin


def choose(
    model: torch.nn.Module,
    plugin: FullyShardedDataParallelPlugin,
    ignored: set[torch.nn.Parameter],
    *,
    warns: bool,
) -> list[torch.nn.Module]:
    """Return the modules to shard each on its own, inner ones first, without the model itself.

    A module that shares parameters with one outside is left to the module around both.

    Args:
        model: the user's.
        plugin: whose policy chooses.
        ignored: parameters that are not sharded.
        warns: whether this process warns where the policy chooses none.
    """
    policy = plugin.wrap_policy(model)
    if policy is None:
        return []
    if hasattr(policy, "_run_policy"):  # ModuleWrapPolicy, CustomPolicy and LambdaPolicy of torch
        wanted = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
        found = [part for part in _bottom_up(model) if part in wanted and part is not model]
    else:
        taken: dict[torch.nn.Module, None] = {}
        _collect(model, _adapt_policy(policy), _sizes(model, ignored), taken)
        found = list(taken)
    shared = _owners(model)
    kept = [part for part in found if _is_apart(part, shared) and not _is_container(part)]
    if not kept and warns:
        warn(
            f"no block of {type(model).__name__} is sharded on its own, so that all weights are gathered at once: name "
            "classes in transformer_cls_names_to_wrap (fsdp_transformer_layer_cls_to_wrap), or a smaller "
            "min_num_params",
        )
    return kept


def check_weights(
    model: torch.nn.Module,
    units: Sequence[torch.nn.Module],
    ignored: set[torch.nn.Parameter],
    *,
    are_widened: bool,
) -> None:
    """Raise ValueError where torch could not shard the weights of a model; nothing has changed by then.

    Args:
        model: the user's.
        units: what is sharded on its own, inner ones first.
        ignored: parameters that are not sharded.
        are_widened: whether all trainable weights become float32.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and parameter not in ignored:
            raise ValueError(
                f"{name!r} is a single number without a dimension, of which processes cannot each hold a part: make "
                "it a parameter of shape [1]"
            )
    if are_widened:
        return
    seen = set(ignored)
    for unit in (*units, model):
        first: dict[torch.dtype, str] = {}
        for name, parameter in unit.named_parameters():
            if parameter.requires_grad and parameter not in seen:
                first.setdefault(parameter.dtype, name)
            seen.add(parameter)
        if len(first) > 1:
            shown = " and ".join(f"{name!r} is {dtype}" for dtype, name in first.items())
            raise ValueError(
                f"weights of one dtype are sharded together, and in {type(unit).__name__} {shown}: bring them to one "
                "dtype, or set mixed_precision, which trains all of them in float32"
            )


def _adapt_policy(policy: Callable[..., Any]) -> Callable[..., bool]:
    """Return a policy with the arguments that torch gives; one of a module alone does not decide about its parts."""
    names = inspect.signature(policy).parameters
    if "recurse" in names or any(item.kind is item.VAR_KEYWORD for item in names.values()):
        return policy

    def ask(*, module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or bool(policy(module))

    return ask


def _collect(
    module: torch.nn.Module,
    policy: Callable[..., bool],
    sizes: dict[torch.nn.Module, int],
    found: dict[torch.nn.Module, None],
    is_root: bool = True,
) -> int:
    """Add the modules that the policy wants, inner ones first; return how many parameters they hold."""
    if module in found:
        return 0
    size = sizes[module]
    if size == 0 or not policy(module=module, recurse=True, nonwrapped_numel=size):
        return 0
    inside = sum(_collect(child, policy, sizes, found, False) for child in module.children())
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=size - inside):
        return inside
    found[module] = None
    return size


def _sizes(model: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> dict[torch.nn.Module, int]:
    """Return how many parameters each module holds, with those inside it."""
    sizes: dict[torch.nn.Module, int] = {}

    def measure(module: torch.nn.Module) -> int:
        if module not in sizes:
            own = [item for item in module._parameters.values() if item is not None and item not in ignored]
            sizes[module] = sum(map(torch.Tensor.numel, own)) + sum(map(measure, module.children()))
        return sizes[module]

    measure(model)
    return sizes


def _bottom_up(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.modules())[::-1]


def _owners(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[torch.nn.Module]]:
    """Return the modules of each parameter that has several."""
    owners: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(module)
    return {parameter: modules for parameter, modules in owners.items() if len(modules) > 1}


def _is_apart(module: torch.nn.Module, shared: dict[torch.nn.Parameter, list[torch.nn.Module]]) -> bool:
    if not shared:
        return True
    inside = set(module.modules())
    return all(
        inside.issuperset(shared[parameter]) for parameter in module.parameters() if parameter in shared
    )


def _is_container(module: torch.nn.Module) -> bool:
    return type(module).forward in (torch.nn.Module.forward, torch.nn.ModuleList.forward)


def recompute(blocks: Sequence[torch.nn.Module], *, offload: torch.device | None = None) -> None:
    """Let blocks compute their activations again in backward.

    Args:
        blocks: of a model.
        offload: the device of the blocks, whose inputs are kept on the CPU until then; None keeps them there.
    """
    for block in blocks:
        vars(block)["forward"] = RecomputedForward(block.forward, offload)


class RecomputedForward:
    """A forward that keeps only its inputs for backward; its signature is that of the module's own forward."""

    def __init__(self, forward: Callable[..., Any], offload: torch.device | None) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with nullcontext() if self._offload is None else _save_on_cpu(self._offload):
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)

    def rebind(self, old: torch.nn.Module, new: torch.nn.Module) -> RecomputedForward:
        """Return this forward for a copy of the module.

        Args:
            old: the module.
            new: its copy, whose own forward is called.
        """
        if getattr(self._forward, "__self__", None) is not old:
            return self
        return RecomputedForward(MethodType(self._forward.__func__, new), self._offload)  # type: ignore[attr-defined]


def _save_on_cpu(device: torch.device) -> Any:
    """Return torch's context that keeps tensors of a device on the CPU, in pinned memory where it has streams."""
    return torch.autograd.graph.save_on_cpu(pin_memory=devices.has_streams(device), device_type=device.type)


def set_prefetching(blocks: Sequence[Any], plugin: FullyShardedDataParallelPlugin) -> None:
    """Say when blocks gather the weights of the next blocks.

    Args:
        blocks: sharded, in the order in which the model holds them.
        plugin: says how early.
    """
    if plugin.forward_prefetch:
        for block, after in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([after])
    if not plugin.prefetches_backward:
        for block in blocks:
            block.set_modules_to_backward_prefetch(
                [block]
            )  # of itself, which it has already, instead of the next


def let_torch_divide(model: torch.nn.Module, device: torch.device) -> None:
    """Let torch itself divide summed gradients where gloo, which is asked for their mean, would return the sum.

    That is so in torch 2.8: gloo's reduce-scatter takes AVG for SUM there.

    Args:
        model: sharded by fully_shard, in whole or in parts.
        device: of this process.
    """
    from torch.distributed.fsdp import FSDPModule

    if device.type != "cpu" or probes.at_least("torch", "2.9"):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
