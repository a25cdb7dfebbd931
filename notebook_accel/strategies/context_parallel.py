"""Context parallel: each process has a part of every sequence, and attention exchanges the parts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from ..combinations import refuse
from ..parallelism import ParallelismConfig

_RECURRENT: Final = ("linear_attention", "mamba", "recurrent", "conv")
"""Words in the `layer_types` of transformers' configs."""


def use_causal_attention(model: torch.nn.Module) -> None:
    """Let a model's attention be causal without a mask, since torch's context parallel takes none.

    Models of transformers make a mask, also where it says no more than causal, and give it to their modules
    `self_attn`. A mask of padding is left out too: it changes nothing for tokens that precede the padding.

    Args:
        model: gets hooks on these modules.

    Raises:
        ValueError: layers see less than all earlier tokens, so that their mask means more than causal.
    """
    refuse_recurrent_layers(model)
    if kinds := sorted(_find_layer_kinds(model) - {"full_attention"}):
        raise refuse("cp, windows", _describe_layers(model, kinds))
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "self_attn":
            module.register_forward_pre_hook(_leave_mask_out, with_kwargs=True)


def refuse_recurrent_layers(model: torch.nn.Module) -> None:
    """Check that no layer hands a state on from token to token: in each part of a sequence it would begin anew.

    Args:
        model: of transformers, whose config says what its layers are; nothing is known of others.

    Raises:
        ValueError: there are layers of linear attention, Mamba or the like.
    """
    kinds = sorted(kind for kind in _find_layer_kinds(model) if any(word in kind for word in _RECURRENT))
    if kinds:
        raise refuse("cp, recurrent", _describe_layers(model, kinds))


def _find_layer_kinds(model: torch.nn.Module) -> set[str]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds or ({"sliding_attention"} if getattr(config, "sliding_window", None) else set())


def _describe_layers(model: torch.nn.Module, kinds: Iterable[str]) -> str:
    return f"{type(model).__name__} has layers with {' and '.join(kinds)}"


def _leave_mask_out(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": None, "is_causal": True}
    return args, kwargs


def split_sequences(
    mesh: Any,
    parallelism: ParallelismConfig,
    buffers: list[torch.Tensor],
    dims: list[int],
    no_restore: set[torch.Tensor],
) -> AbstractContextManager[None]:
    """Return torch's context in which each process of a mesh has its part of the sequences.

    Args:
        mesh: of one dimension.
        parallelism: says how attention exchanges parts.
        buffers: tensors with a dimension of sequences; they are cut in place.
        dims: that dimension of each.
        no_restore: buffers that stay cut after the block.
    """
    from torch.distributed.tensor.experimental import context_parallel as torch_context
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    assert parallelism.cp_handler is not None
    set_rotate_method(str(parallelism.cp_handler.cp_comm_strategy))
    context: AbstractContextManager[None] = torch_context(
        mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=no_restore
    )
    return context
