"""The names that users import from `accelerate.utils`; they are defined in other modules."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..affinity import set_numa_affinity
from ..checkpointing.merge import merge_fsdp_weights
from ..checkpointing.plain import load, save
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
from ..deepspeed.config import HfDeepSpeedConfig
from ..deepspeed.dummies import DummyOptim, DummyScheduler
from ..deepspeed.plugin import DeepSpeedPlugin
from ..deepspeed.resolve import get_active_deepspeed_plugin
from ..deepspeed.wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from ..environ import clear_environment, patch_environment, purge_accelerate_environment
from ..errors import CollectiveError as DistributedOperationException
from ..fp8 import AORecipeKwargs, FP8BackendType
from ..fsdp import (
    FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
)
from ..handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
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
from ..parallelism import (
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from ..precision import PrecisionType, convert_outputs_to_fp32
from ..probes import is_rich_available
from ..quantization import BnbQuantizationConfig, load_and_quantize_model
from ..seeding import RNGType, set_seed, synchronize_rng_state, synchronize_rng_states
from ..state import DistributedType
from ..strategies.base import unwrap as extract_model_from_parallel
from ..takeover.names import complete_names
from ..tracking import LoggerType
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
from .fsdp import fsdp2_load_full_state_dict, fsdp2_prepare_model, fsdp2_switch_optimizer_parameters
from .modeling import (
    align_module_device,
    calculate_maximum_sizes,
    check_device_map,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    has_offloaded_params,
    id_tensor_storage,
    infer_auto_device_map,
    is_peft_model,
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_state_dict,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from .modules import get_module_children_bottom_up, has_transformer_engine_layers
from .offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
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
from .tqdm import tqdm
from .vendor import (
    AbstractTrainStep,
    BertTrainStep,
    DeepSpeedSequenceParallelConfig,
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

if TYPE_CHECKING:  # each is imported when it is asked for, by `complete_names`
    from ..nested import ignorant_find_batch_size
    from .constants import (
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
        MODEL_NAME,
        OPTIMIZER_NAME,
        PROFILE_PATTERN_NAME,
        RNG_STATE_NAME,
        SAFE_MODEL_NAME,
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        SAFE_WEIGHTS_PATTERN_NAME,
        SAMPLER_NAME,
        SCALER_NAME,
        SCHEDULER_NAME,
        TORCH_DISTRIBUTED_OPERATION_TYPES,
        TORCH_LAUNCH_PARAMS,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        WEIGHTS_PATTERN_NAME,
        XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
    )
    from .fsdp import ensure_weights_retied, fsdp2_canonicalize_names, get_fsdp2_grad_scaler
    from .fsdp_files import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
    from .launch import PrepareForLaunch
    from .layers import (
        convert_model_to_fp8_ao,
        filter_first_and_last_linear_layers,
        has_4bit_bnb_layers,
        has_ao_layers,
    )
    from .libraries import (
        deepspeed_required,
        is_4bit_bnb_available,
        is_8bit_bnb_available,
        is_amdsmi_available,
        is_bitsandbytes_multi_backend_available,
        is_bnb_available,
        is_boto3_available,
        is_fp8_available,
        is_habana_gaudi1,
        is_hpu_available,
        is_import_timer_available,
        is_lomo_available,
        is_matplotlib_available,
        is_megatron_lm_available,
        is_mlu_available,
        is_msamp_available,
        is_musa_available,
        is_neuron_available,
        is_peft_available,
        is_pippy_available,
        is_pynvml_available,
        is_pytest_available,
        is_rocm_available,
        is_sagemaker_available,
        is_schedulefree_available,
        is_sdaa_available,
        is_timm_available,
        is_torchao_available,
        is_torchdata_available,
        is_torchdata_stateful_dataloader_available,
        is_torchvision_available,
        is_transformer_engine_available,
        is_transformer_engine_mxfp8_available,
        is_triton_available,
        is_weights_only_available,
        is_xccl_available,
        torchao_required,
    )
    from .machine import (
        check_cuda_fp8_capability,
        check_cuda_p2p_ib_support,
        convert_dict_to_env_variables,
        get_cpu_distributed_information,
        get_current_device_type,
        get_gpu_info,
    )
    from .operations import copy_tensor_to_devices, pad_input_tensors
    from .other import (
        CustomDtype,
        are_libraries_initialized,
        check_os_kernel,
        clean_state_dict_for_safetensors,
        convert_bytes,
        get_int_from_env,
        get_model_tp_size,
        get_pretty_name,
        is_port_in_use,
        merge_dicts,
        model_has_dtensor,
        parse_choice_from_env,
        parse_flag_from_env,
        recursive_getattr,
        str_to_bool,
    )
    from .structure import (
        GatheredParameters,
        TensorInformation,
        find_device,
        get_data_structure,
        initialize_tensors,
        is_tensor_information,
    )

    # of `cli`, a floor above
    prepare_multi_gpu_env: Callable[[Any], dict[str, str]]
    prepare_simple_launcher_cmd_env: Callable[[Any], tuple[list[str], dict[str, str]]]

__all__ = [
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "MODEL_NAME", "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME", "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_LAUNCH_PARAMS",
    "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    "AORecipeKwargs", "AbstractTrainStep", "AutocastKwargs", "BaseEnum", "BertTrainStep", "BnbQuantizationConfig",
    "CannotPadNestedTensorWarning", "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType",
    "DataLoaderConfiguration", "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper", "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs",
    "DistributedOperationException", "DistributedType", "DummyOptim", "DummyScheduler", "DynamoBackend",
    "FP8BackendType", "FP8RecipeKwargs", "FullyShardedDataParallelPlugin", "GPTTrainStep", "GatheredParameters",
    "GradScalerKwargs", "GradientAccumulationPlugin", "HfDeepSpeedConfig", "InitProcessGroupKwargs", "KwargsHandler",
    "LoggerType", "MSAMPRecipeKwargs", "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler", "MegatronLMPlugin",
    "OffloadedWeightsLoader", "ParallelismConfig", "PrecisionType", "PrefixedDataset", "PrepareForLaunch",
    "ProfileKwargs", "ProjectConfiguration", "RNGType", "SageMakerDistributedType", "T5TrainStep", "TERecipeKwargs",
    "TensorInformation", "TorchContextParallelConfig", "TorchDynamoPlugin", "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin", "align_module_device", "apply_fp8_autowrap", "are_libraries_initialized",
    "avg_losses_across_data_parallel_group", "broadcast", "broadcast_object_list", "calculate_maximum_sizes",
    "check_cuda_fp8_capability", "check_cuda_p2p_ib_support", "check_device_map", "check_os_kernel",
    "check_tied_parameters_in_config", "check_tied_parameters_on_same_device", "clean_state_dict_for_safetensors",
    "clear_environment", "compare_versions", "compile_regions", "compute_module_sizes", "concatenate",
    "contextual_fp8_autocast", "convert_bytes", "convert_dict_to_env_variables", "convert_file_size_to_int",
    "convert_model", "convert_model_to_fp8_ao", "convert_outputs_to_fp32", "convert_to_fp32",
    "copy_tensor_to_devices", "deepspeed_required", "disable_fsdp_ram_efficient_loading", "dtype_byte_size",
    "enable_fsdp_ram_efficient_loading", "ensure_weights_retied", "extract_model_from_parallel",
    "extract_submodules_state_dict", "filter_first_and_last_linear_layers", "find_batch_size", "find_device",
    "find_executable_batch_size", "find_tied_parameters", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict",
    "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters", "gather", "gather_object",
    "get_active_deepspeed_plugin", "get_balanced_memory", "get_cpu_distributed_information",
    "get_current_device_type", "get_data_structure", "get_fsdp2_grad_scaler", "get_gpu_info", "get_grad_scaler",
    "get_int_from_env", "get_max_layer_size", "get_max_memory", "get_mixed_precision_context_manager",
    "get_model_tp_size", "get_module_children_bottom_up", "get_pretty_name", "has_4bit_bnb_layers", "has_ao_layers",
    "has_compiled_regions", "has_offloaded_params", "has_transformer_engine_layers", "honor_type",
    "id_tensor_storage", "ignorant_find_batch_size", "infer_auto_device_map", "initialize_tensors", "install_xla",
    "is_4bit_bnb_available", "is_8bit_bnb_available", "is_aim_available", "is_amdsmi_available", "is_bf16_available",
    "is_bitsandbytes_multi_backend_available", "is_bnb_available", "is_boto3_available", "is_clearml_available",
    "is_comet_ml_available", "is_compiled_module", "is_cuda_available", "is_datasets_available",
    "is_deepspeed_available", "is_dvclive_available", "is_fp8_available", "is_fp16_available", "is_habana_gaudi1",
    "is_hpu_available", "is_import_timer_available", "is_lomo_available", "is_matplotlib_available",
    "is_megatron_lm_available", "is_mlflow_available", "is_mlu_available", "is_mps_available", "is_msamp_available",
    "is_musa_available", "is_namedtuple", "is_neuron_available", "is_npu_available", "is_pandas_available",
    "is_peft_available", "is_peft_model", "is_pippy_available", "is_port_in_use", "is_pynvml_available",
    "is_pytest_available", "is_rich_available", "is_rocm_available", "is_sagemaker_available",
    "is_schedulefree_available", "is_sdaa_available", "is_swanlab_available", "is_tensor_information",
    "is_tensorboard_available", "is_timm_available", "is_torch_tensor", "is_torch_version", "is_torch_xla_available",
    "is_torchao_available", "is_torchdata_available", "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available", "is_tqdm_available", "is_trackio_available", "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available", "is_transformers_available", "is_triton_available", "is_wandb_available",
    "is_weights_only_available", "is_xccl_available", "is_xpu_available", "listify", "load",
    "load_and_quantize_model", "load_checkpoint_in_model", "load_fsdp_model", "load_fsdp_optimizer",
    "load_offloaded_weight", "load_offloaded_weights", "load_state_dict", "merge_dicts", "merge_fsdp_weights",
    "model_has_dtensor", "named_module_tensors", "offload_state_dict", "offload_weight", "pad_across_processes",
    "pad_input_tensors", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
    "prepare_multi_gpu_env", "prepare_simple_launcher_cmd_env", "purge_accelerate_environment", "recursive_getattr",
    "recursively_apply", "reduce", "release_memory", "retie_parameters", "save", "save_fsdp_model",
    "save_fsdp_optimizer", "save_offload_index", "send_to_device", "set_module_tensor_to_device", "set_numa_affinity",
    "set_seed", "slice_tensors", "str_to_bool", "synchronize_rng_state", "synchronize_rng_states", "torchao_required",
    "tqdm", "wait_for_everyone", "write_basic_config",
]  # fmt: skip

complete_names(__name__)
