"""The collectives of `comm.ops`, for the runtime of this process; see there for arguments and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import detect
from ..comm import ops
from ..nested import recursively_apply as recursively_apply
from ..takeover.names import complete_names

if TYPE_CHECKING:  # each is imported when it is asked for, by `complete_names`
    from .. import errors, nested
    from ..comm.ops import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from ..nested import concatenate as concatenate
    from ..nested import convert_to_fp32 as convert_to_fp32
    from ..nested import find_batch_size as find_batch_size
    from ..nested import honor_type as honor_type
    from ..nested import ignorant_find_batch_size as ignorant_find_batch_size
    from ..nested import is_namedtuple as is_namedtuple
    from ..nested import listify as listify
    from ..nested import send_to_device as send_to_device
    from ..nested import slice_tensors as slice_tensors
    from ..precision import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from .structure import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
    from .structure import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
    from .structure import GatheredParameters as GatheredParameters
    from .structure import find_device as find_device
    from .structure import get_data_structure as get_data_structure
    from .structure import get_shape as get_shape
    from .structure import initialize_tensors as initialize_tensors
    from .structure import is_tensor_information as is_tensor_information
    from .structure import is_torch_xpu_tensor as is_torch_xpu_tensor

    DistributedOperationException = errors.CollectiveError
    is_torch_tensor = nested.is_tensor


def gather(tensor: Any) -> Any:
    """Concatenate nested tensors over all processes on dim 0.

    Args:
        tensor: nested data of tensors [n, ...]; the result has [num_processes * n, ...].
    """
    return ops.gather(detect.ensure().comm, tensor)


def gather_object(object: Any) -> Any:
    """Join the lists of all processes into one, in rank order.

    Args:
        object: a list of items that can be pickled.
    """
    return ops.gather_object(detect.ensure().comm, object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite nested tensors in place with those of one rank.

    Args:
        tensor: nested data.
        from_process: the rank.
    """
    return ops.broadcast(detect.ensure().comm, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the list in place with that of one rank.

    Args:
        object_list: a list of items that can be pickled.
        from_process: the rank.
    """
    return ops.broadcast_object_list(detect.ensure().comm, object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine nested tensors over all processes.

    Args:
        tensor: nested data.
        reduction: `sum`, `mean` or `max`; `none` copies them.
        scale: factor of each result.
    """
    return ops.reduce(detect.ensure().comm, tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad nested tensors along a dimension to the longest of all processes.

    Args:
        tensor: nested data.
        dim: the dimension.
        pad_index: the value to pad with.
        pad_first: pad at the beginning instead of the end.
    """
    return ops.pad_across_processes(detect.ensure().comm, tensor, dim, pad_index, pad_first)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return nested tensors with zeros at the end of dim 0, so that processes get equal parts of a small batch.

    Args:
        tensor: nested data.
        batch_size: rows that count.
        num_processes: that share them.
        dim: the dimension along which the values stand; the zeros are always on dim 0.
    """
    each, rest = divmod(batch_size, num_processes)
    missing = num_processes - (each or batch_size)
    if missing < 1 and rest > missing:
        missing = rest - missing

    def pad(part: torch.Tensor) -> torch.Tensor:
        padded = part.new_zeros((batch_size + missing, *part.shape[1:]))
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        return padded

    return recursively_apply(pad, tensor, error_on_other_type=True)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return in all processes a tensor that one of them has.

    Args:
        tensor: None in the other processes, which need not know its shape.
    """
    runtime = detect.ensure()
    kinds = ops.gather_object(runtime.comm, [None if tensor is None else (tensor.shape, tensor.dtype)])
    shape, dtype = next(kind for kind in kinds if kind is not None)
    mine = (
        torch.zeros(shape, dtype=dtype, device=runtime.device)
        if tensor is None
        else tensor.to(runtime.device)
    )
    found: torch.Tensor = ops.reduce(runtime.comm, mine, "sum")
    return found


def wait_for_everyone() -> None:
    """Return once every process has come here."""
    detect.ensure().comm.barrier()


complete_names(__name__)
