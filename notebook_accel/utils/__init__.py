"""Compatibility shelf: the names that users import from `accelerate.utils`."""

from ..checkpointing.plain import load, save
from ..checkpointing.project import ProjectConfiguration
from ..checkpointing.shards import load_checkpoint_in_model, load_state_dict
from ..choices import Choice as BaseEnum
from ..comm.ops import CannotPadNestedTensorWarning
from ..data_loader.config import DataLoaderConfiguration
from ..environ import clear_environment, patch_environment
from ..errors import CollectiveError as DistributedOperationException
from ..handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from ..nested import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    honor_type,
    is_namedtuple,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from ..nested import is_tensor as is_torch_tensor
from ..precision import PrecisionType, convert_outputs_to_fp32
from ..seeding import RNGType, set_seed, synchronize_rng_state, synchronize_rng_states
from ..state import DistributedType
from ..strategies.base import unwrap as extract_model_from_parallel
from .availability import (
    compare_versions,
    is_bf16_available,
    is_cuda_available,
    is_datasets_available,
    is_deepspeed_available,
    is_fp16_available,
    is_mps_available,
    is_npu_available,
    is_pandas_available,
    is_rich_available,
    is_tensorboard_available,
    is_torch_version,
    is_torch_xla_available,
    is_tqdm_available,
    is_transformers_available,
    is_wandb_available,
    is_xpu_available,
)
from .operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)

__all__ = [
    "AutocastKwargs",
    "BaseEnum",
    "CannotPadNestedTensorWarning",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "PrecisionType",
    "ProjectConfiguration",
    "RNGType",
    "broadcast",
    "broadcast_object_list",
    "clear_environment",
    "compare_versions",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "gather",
    "gather_object",
    "honor_type",
    "is_bf16_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_fp16_available",
    "is_mps_available",
    "is_namedtuple",
    "is_npu_available",
    "is_pandas_available",
    "is_rich_available",
    "is_tensorboard_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_tqdm_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
    "listify",
    "load",
    "load_checkpoint_in_model",
    "load_state_dict",
    "pad_across_processes",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "save",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "wait_for_everyone",
]
