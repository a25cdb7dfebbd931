"""The names that users import from `accelerate.utils.modeling`; most are defined in other modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import probes
from ..big_modeling import limits
from ..big_modeling.device_map import check_device_map, clean_device_map, infer_auto_device_map
from ..big_modeling.limits import convert_file_size_to_int, get_balanced_memory
from ..big_modeling.load import load_checkpoint_in_model, load_state_dict
from ..big_modeling.offload import load_offloaded_weights
from ..big_modeling.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_max_layer_size,
    list_leaves,
)
from ..big_modeling.state import get_state_dict_from_offload, get_state_dict_offloaded_model
from ..big_modeling.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    get_module_size_with_ties,
    retie_parameters,
)
from ..hooks.align import align_module_device, has_offloaded_params
from ..hooks.tensors import (
    Device,
    as_device,
    is_same_device,
    named_module_tensors,
    non_persistent_buffers,
    set_module_tensor_to_device,
)
from ..takeover.names import complete_names

if TYPE_CHECKING:  # each is imported when it is asked for, by `complete_names`
    from .amp import get_grad_scaler as get_grad_scaler
    from .amp import get_mixed_precision_context_manager as get_mixed_precision_context_manager
    from .constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]


def check_device_same(first_device: Device, second_device: Device) -> bool:
    """Return True for the same device; a device without a number is the first of its kind.

    Args:
        first_device: a device of torch, or its name or number.
        second_device: likewise.
    """
    return is_same_device(as_device(first_device), as_device(second_device))


def get_max_memory(max_memory: limits.Limits | None = None) -> dict[int | str, int]:
    """Return bytes by device: GPUs by number in order, then `mps`, `cpu` and `disk`.

    Args:
        max_memory: see `big_modeling.limits.get_max_memory`. A dict has the bytes then too: Transformers compares it
            with what is returned.

    Raises:
        ValueError: it is no mapping, or names a device or a size that is not legal.
    """
    found = limits.get_max_memory(max_memory)
    if isinstance(max_memory, MutableMapping):
        max_memory.update(found)
    return found


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names that have no other names within them.

    Args:
        module_sizes: bytes by name.
    """
    return list_leaves(module_sizes)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not in the state dict.

    Args:
        module: with the buffers.
        recurse: those of modules inside too.
        fqns: return full names; by default the last part of each.
    """
    names: Iterable[str] = non_persistent_buffers(module, recurse)
    return set(names) if fqns else {name.rpartition(".")[2] for name in names}


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what tensors of one memory have in common: its device, its address, and its size in bytes.

    Args:
        tensor: on any device.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def is_peft_model(model: nn.Module) -> bool:
    """Return True for a model of PEFT. PEFT need not be installed.

    Args:
        model: any model.
    """
    if not probes.is_available("peft"):
        return False
    from peft import PeftModel  # type: ignore[import-not-found,unused-ignore]

    inner = getattr(model, "_orig_mod", model)
    return isinstance(inner, PeftModel)


complete_names(__name__)
