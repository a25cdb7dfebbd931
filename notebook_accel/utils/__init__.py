"""Compatibility shelf: the names that users import from `accelerate.utils`."""

from ..affinity import set_numa_affinity
from ..checkpointing.merge import merge_fsdp_weights
from ..checkpointing.plain import load, save
from ..checkpointing.project import ProjectConfiguration
from ..checkpointing.shards import load_checkpoint_in_model, load_state_dict
from ..choices import Choice as BaseEnum
from ..choices import ComputeEnvironment, SageMakerDistributedType
from ..comm.ops import CannotPadNestedTensorWarning
from ..compilation import (
    DynamoBackend,
    TorchDynamoPlugin,
    compile_regions,
    has_compiled_regions,
    is_compiled_module,
)
from ..config.basic import write_basic_config
from ..data_loader.config import DataLoaderConfiguration
from ..environ import clear_environment, patch_environment, purge_accelerate_environment
from ..errors import CollectiveError as DistributedOperationException
from ..fp8 import AORecipeKwargs, FP8BackendType
from ..handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from ..memory import find_executable_batch_size, release_memory
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
from ..probes import is_rich_available
from ..quantization import BnbQuantizationConfig, load_and_quantize_model
from ..seeding import RNGType, set_seed, synchronize_rng_state, synchronize_rng_states
from ..state import DistributedType
from ..strategies.base import unwrap as extract_model_from_parallel
from ..strategies.deepspeed_parts import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from ..tracking import LoggerType
from ..zero.chosen import get_active_deepspeed_plugin
from ..zero.config import HfDeepSpeedConfig
from ..zero.dummies import DummyOptim, DummyScheduler
from ..zero.plugin import DeepSpeedPlugin
from .amp import get_grad_scaler, get_mixed_precision_context_manager
from .availability import (
    compare_versions,
    is_aim_available,
    is_bf16_available,
    is_clearml_available,
    is_comet_ml_available,
    is_cuda_available,
    is_datasets_available,
    is_deepspeed_available,
    is_dvclive_available,
    is_fp16_available,
    is_mlflow_available,
    is_mps_available,
    is_npu_available,
    is_pandas_available,
    is_swanlab_available,
    is_tensorboard_available,
    is_torch_version,
    is_torch_xla_available,
    is_tqdm_available,
    is_trackio_available,
    is_transformers_available,
    is_wandb_available,
    is_xpu_available,
)
from .modules import get_module_children_bottom_up, has_transformer_engine_layers
from .operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)
from .vendor import (
    AbstractTrainStep,
    BertTrainStep,
    FP8RecipeKwargs,
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    T5TrainStep,
    TERecipeKwargs,
    apply_fp8_autowrap,
    avg_losses_across_data_parallel_group,
    contextual_fp8_autocast,
    convert_model,
    install_xla,
)

__all__ = [
    "AORecipeKwargs",
    "AbstractTrainStep",
    "AutocastKwargs",
    "BaseEnum",
    "BertTrainStep",
    "BnbQuantizationConfig",
    "CannotPadNestedTensorWarning",
    "ComputeEnvironment",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "GPTTrainStep",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "HfDeepSpeedConfig",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "T5TrainStep",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "apply_fp8_autowrap",
    "avg_losses_across_data_parallel_group",
    "broadcast",
    "broadcast_object_list",
    "clear_environment",
    "compare_versions",
    "compile_regions",
    "concatenate",
    "contextual_fp8_autocast",
    "convert_model",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_active_deepspeed_plugin",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "get_module_children_bottom_up",
    "has_compiled_regions",
    "has_transformer_engine_layers",
    "honor_type",
    "install_xla",
    "is_aim_available",
    "is_bf16_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp16_available",
    "is_mlflow_available",
    "is_mps_available",
    "is_namedtuple",
    "is_npu_available",
    "is_pandas_available",
    "is_rich_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
    "listify",
    "load",
    "load_and_quantize_model",
    "load_checkpoint_in_model",
    "load_state_dict",
    "merge_fsdp_weights",
    "pad_across_processes",
    "patch_environment",
    "purge_accelerate_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_numa_affinity",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "wait_for_everyone",
    "write_basic_config",
]
