"""The modules of Accelerate 1.15, and where the names that they define are in this package.

Each row of `PATHS` is a module of Accelerate: the modules here that have its names, below `notebook_accel`. A name that
is another one here is written `theirs=ours`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

PATHS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {  # by their own modules, because the package imports all of its names at once
        "accelerator": "Accelerator",
        "big_modeling": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map "
        "init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model",
        "data_loader": "DataLoaderConfiguration skip_first_batches",
        "deepspeed.plugin": "DeepSpeedPlugin",
        "fsdp": "FullyShardedDataParallelPlugin",
        "handlers": "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs GradScalerKwargs "
        "InitProcessGroupKwargs ProfileKwargs",
        "inference": "prepare_pippy",
        "launchers": "debug_launcher notebook_launcher",
        "memory": "find_executable_batch_size",
        "parallelism": "ParallelismConfig",
        "probes": "is_rich_available",
        "seeding": "synchronize_rng_states",
        "state": "DistributedType PartialState",
    },
    "accelerator": {"accelerator": "Accelerator"},
    "big_modeling": {
        "big_modeling": "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model "
        "init_empty_weights init_on_device load_checkpoint_and_dispatch",
        "strategies.context_parallel": "_refuse_recurrent_layers_under_sequence_parallelism=refuse_recurrent_layers",
    },
    "checkpointing": {},
    "commands": {},
    "commands.accelerate_cli": {},
    "commands.config": {
        "cli.config_parser": "get_config_parser",
        "utils.cluster": "default_config_file load_config_from_file",
    },
    "commands.config.config": {"cli.config_parser": "config_command config_command_parser"},
    "commands.config.config_args": {
        "utils.registry": "cache_dir hf_cache_home",
        "utils.cluster": "BaseConfig ClusterConfig SageMakerConfig default_config_file "
        "default_json_config_file=default_config_file default_yaml_config_file=default_config_file "
        "load_config_from_file",
    },
    "commands.config.default": {
        "cli.config_parser": "default_command_parser default_config_command",
        "utils": "write_basic_config",
    },
    "commands.config.update": {
        "cli.config_parser": "update_command_parser update_config update_config_command"
    },
    "commands.env": {"cli.env_parser": "env_command env_command_parser which"},
    "commands.estimate": {
        "cli.estimate_parser": "add_timm_hub_prefix check_has_model create_empty_model estimate_command "
        "estimate_command_parser estimate_training_usage gather_data verify_on_hub",
    },
    "commands.launch": {
        "cli.launch_parser": "_validate_launch_command=validate_launch_command launch_command launch_command_parser",
    },
    "commands.merge": {"cli.merge_parser": "merge_command merge_command_parser"},
    "commands.test": {
        "cli.test_parser": "test_command test_command_parser",
        "utils.testing_programs": "execute_subprocess_async path_in_accelerate_package",
    },
    "commands.to_fsdp2": {
        "cli.to_fsdp2_parser": "convert_config_to_fsdp2 load_config to_fsdp2_command to_fsdp2_command_parser",
    },
    "commands.tpu": {"cli.tpu_parser": "tpu_command_launcher tpu_command_parser"},
    "data_loader": {
        "data_loader": "BatchSamplerShard DataLoaderDispatcher DataLoaderShard IterableDatasetShard "
        "SeedableRandomSampler SkipBatchSampler SkipDataLoader prepare_data_loader skip_first_batches",
        "data_loader.base": "DataLoaderAdapter=PreparedLoader DataLoaderStateMixin=PreparedLoader",
        "data_loader.samplers": "get_sampler",
    },
    "hooks": {
        "hooks": "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook "
        "remove_hook_from_module remove_hook_from_submodules",
    },
    "inference": {"inference": "prepare_pippy"},
    "launchers": {"launchers": "debug_launcher notebook_launcher"},
    "local_sgd": {"local_sgd": "LocalSGD"},
    "logging": {"logging": "MultiProcessAdapter get_logger"},
    "memory_utils": {},
    "optimizer": {"optimizer": "AcceleratedOptimizer", "utils.other": "move_to_device"},
    "parallelism_config": {"parallelism": "ParallelismConfig"},
    "scheduler": {"scheduler": "AcceleratedScheduler"},
    "state": {
        "state": "AcceleratorState GradientState PartialState",
        "utils.registry": "do_nothing is_initialized",
    },
    "test_utils": {
        "utils.testing": "are_the_same_tensors device_count get_launch_command memory_allocated_func "
        "require_bnb require_cpu require_cuda require_cuda_or_hpu "
        "require_cuda_or_xpu require_fp16 require_fp8 require_huggingface_suite require_mlu require_mps "
        "require_multi_device require_multi_gpu require_multi_gpu_or_xpu require_multi_xpu require_musa "
        "require_non_cpu require_non_hpu require_non_torch_xla require_non_xpu require_npu require_pippy "
        "require_sdaa require_single_device require_single_gpu require_single_xpu "
        "require_torch_min_version require_torchao require_torchvision require_tpu "
        "require_transformer_engine require_transformer_engine_mxfp8 require_xpu run_first skip slow "
        "torch_device",
        "utils.testing_cases": "assert_exception capture_call_output",
        "utils.testing_models": "RegressionDataset RegressionModel",
        "utils.testing_programs": "DEFAULT_LAUNCH_COMMAND execute_subprocess_async get_torch_dist_unique_port "
        "path_in_accelerate_package pytest_xdist_worker_id",
        "test_utils.scripts": "test_ops test_script test_sync",
    },
    "test_utils.scripts": {"test_utils.scripts": "test_ops test_script test_sync"},
    "test_utils.scripts.test_ops": {"test_utils.scripts.test_ops": "main"},
    "test_utils.scripts.test_script": {"test_utils.scripts.test_script": "main"},
    "test_utils.scripts.test_sync": {"test_utils.scripts.test_sync": "main"},
    "test_utils.testing": {
        "utils.testing": "are_the_same_tensors device_count get_backend get_launch_command memory_allocated_func "
        "require_aim require_bnb require_clearml require_comet_ml require_cpu require_cuda require_cuda_or_hpu "
        "require_cuda_or_xpu require_datasets require_deepspeed require_dvclive require_fp16 require_fp8 "
        "require_fsdp2 require_huggingface_suite require_import_timer require_matplotlib require_mlflow require_mlu "
        "require_mps require_multi_device require_multi_gpu require_multi_gpu_or_xpu require_multi_xpu require_musa "
        "require_neuron require_non_cpu require_non_hpu require_non_torch_xla require_non_xpu require_npu "
        "require_pandas require_peft require_pippy require_schedulefree require_sdaa require_single_device "
        "require_single_gpu require_single_xpu require_swanlab require_tensorboard require_timm "
        "require_torch_min_version require_torchao require_torchdata_stateful_dataloader require_torchvision "
        "require_tp require_tpu require_trackers require_trackio require_transformer_engine "
        "require_transformer_engine_mxfp8 require_transformers require_triton require_wandb require_xpu run_first "
        "skip slow torch_device",
        "utils.testing_cases": "AccelerateTestCase MockingTestCase TempDirTestCase assert_exception "
        "capture_call_output",
        "utils.testing_programs": "DEFAULT_LAUNCH_COMMAND SubprocessCallException execute_subprocess_async "
        "get_torch_dist_unique_port path_in_accelerate_package pytest_xdist_worker_id run_command",
    },
    "test_utils.training": {"utils.testing_models": "RegressionDataset RegressionModel"},
    "tracking": {
        "tracking": "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker MLflowTracker "
        "SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker filter_trackers=choose_trackers "
        "on_main_process register_tracker_class",
        "utils.registry": "LOGGER_TYPE_TO_CLASS get_available_trackers",
    },
    "utils": {},
    "utils.ao": {
        "utils.layers": "convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers "
        "find_first_last_linear_layers has_ao_layers",
    },
    "utils.bnb": {
        "utils": "load_and_quantize_model",
        "utils.layers": "get_parameter_device has_4bit_bnb_layers",
    },
    "utils.constants": {
        "utils.constants": "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION "
        "BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES "
        "DEEPSPEED_MULTINODE_LAUNCHERS DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION "
        "FSDP2_PYTORCH_VERSION FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME "
        "FSDP_PYTORCH_VERSION FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION "
        "MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME "
        "SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME STR_OPERATION_TO_FUNC "
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES "
        "TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME "
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    },
    "utils.dataclasses": {
        "utils": "AORecipeKwargs AutocastKwargs BaseEnum BnbQuantizationConfig ComputeEnvironment "
        "DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin DeepSpeedSequenceParallelConfig "
        "DistributedDataParallelKwargs DistributedType DynamoBackend FP8BackendType FP8RecipeKwargs "
        "FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs "
        "KwargsHandler LoggerType MSAMPRecipeKwargs MegatronLMPlugin PrecisionType ProfileKwargs ProjectConfiguration "
        "RNGType SageMakerDistributedType TERecipeKwargs TorchContextParallelConfig TorchDynamoPlugin "
        "TorchTensorParallelConfig TorchTensorParallelPlugin",
        "choices": "EnumWithContains=ChoiceMeta",
        "utils.other": "CustomDtype get_module_class_from_name",
        "utils.structure": "TensorInformation",
    },
    "utils.deepspeed": {
        "utils.deepspeed": "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim "
        "DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin",
    },
    "utils.environment": {
        "utils.environment": "clear_environment override_numa_affinity patch_environment "
        "purge_accelerate_environment set_numa_affinity",
        "utils.machine": "CPUInformation check_cuda_fp8_capability check_cuda_p2p_ib_support "
        "convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type get_driver_version "
        "get_gpu_info",
        "utils.other": "are_libraries_initialized get_int_from_env parse_choice_from_env parse_flag_from_env "
        "str_to_bool",
    },
    "utils.fsdp_utils": {
        "utils.fsdp": "ensure_weights_retied fsdp2_canonicalize_names get_fsdp2_grad_scaler",
        "utils": "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading fsdp2_load_full_state_dict "
        "fsdp2_prepare_model fsdp2_switch_optimizer_parameters merge_fsdp_weights",
        "utils.fsdp_files": "get_parameters_from_modules load_fsdp_model load_fsdp_optimizer save_fsdp_model "
        "save_fsdp_optimizer",
    },
    "utils.imports": {
        "utils": "is_aim_available is_bf16_available is_clearml_available is_comet_ml_available is_cuda_available "
        "is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available is_mlflow_available "
        "is_mps_available is_npu_available is_pandas_available is_rich_available is_swanlab_available "
        "is_tensorboard_available is_torch_xla_available is_tqdm_available is_trackio_available "
        "is_transformers_available is_wandb_available is_xpu_available",
        "utils.libraries": "USE_TORCH_XLA deepspeed_required is_4bit_bnb_available is_8bit_bnb_available "
        "is_amdsmi_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available "
        "is_fp8_available is_habana_gaudi1 is_hpu_available is_import_timer_available is_lomo_available "
        "is_matplotlib_available is_megatron_lm_available is_mlu_available is_msamp_available is_musa_available "
        "is_neuron_available is_numpy_available is_peft_available is_pippy_available is_pynvml_available "
        "is_pytest_available is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available "
        "is_timm_available is_torch_distributed_available is_torchao_available is_torchdata_available "
        "is_torchdata_stateful_dataloader_available is_torchvision_available is_transformer_engine_available "
        "is_transformer_engine_mxfp8_available is_triton_available is_weights_only_available is_xccl_available "
        "torchao_required",
    },
    "utils.launch": {
        "utils.launch": "PrepareForLaunch",
        "cli.launch_parser": "prepare_multi_gpu_env prepare_simple_launcher_cmd_env",
    },
    "utils.megatron_lm": {
        "utils": "AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler "
        "T5TrainStep avg_losses_across_data_parallel_group",
    },
    "utils.memory": {
        "utils.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    },
    "utils.modeling": {
        "utils.modeling": "align_module_device calculate_maximum_sizes check_device_map check_device_same "
        "check_tied_parameters_in_config check_tied_parameters_on_same_device clean_device_map compute_module_sizes "
        "compute_module_total_buffer_size convert_file_size_to_int dtype_byte_size find_tied_parameters "
        "get_balanced_memory get_max_layer_size get_max_memory get_module_leaves get_module_size_with_ties "
        "get_non_persistent_buffers get_state_dict_from_offload get_state_dict_offloaded_model "
        "has_offloaded_params id_tensor_storage "
        "infer_auto_device_map is_peft_model load_checkpoint_in_model load_offloaded_weights load_state_dict "
        "named_module_tensors retie_parameters set_module_tensor_to_device",
        "utils": "get_grad_scaler get_mixed_precision_context_manager",
        "utils.constants": "WEIGHTS_INDEX_NAME",
    },
    "utils.offload": {
        "utils.offload": "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict "
        "load_offloaded_weight offload_state_dict offload_weight save_offload_index",
    },
    "utils.operations": {
        "utils": "CannotPadNestedTensorWarning DistributedOperationException concatenate convert_outputs_to_fp32 "
        "convert_to_fp32 find_batch_size honor_type is_namedtuple is_torch_tensor listify recursively_apply "
        "send_to_device slice_tensors",
        "utils.operations": "broadcast broadcast_object_list copy_tensor_to_devices gather gather_object "
        "pad_across_processes pad_input_tensors reduce",
        "utils.structure": "GatheredParameters TENSOR_INT_TO_DTYPE TENSOR_TYPE_TO_INT find_device "
        "get_data_structure get_shape initialize_tensors is_tensor_information is_torch_xpu_tensor",
        "nested": "ignorant_find_batch_size",
    },
    "utils.other": {
        "utils": "compile_regions extract_model_from_parallel get_module_children_bottom_up has_compiled_regions "
        "is_compiled_module load save wait_for_everyone",
        "utils.other": "check_os_kernel clean_state_dict_for_safetensors convert_bytes get_free_port "
        "get_model_tp_size get_pretty_name has_repeated_blocks is_port_in_use is_repeated_blocks merge_dicts "
        "model_has_dtensor recursive_getattr",
    },
    "utils.random": {"utils": "set_seed synchronize_rng_state synchronize_rng_states"},
    "utils.rich": {},
    "utils.torch_xla": {"utils": "install_xla"},
    "utils.tqdm": {"utils.tqdm": "tqdm"},
    "utils.transformer_engine": {
        "utils": "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers",
    },
    "utils.versions": {"utils": "compare_versions is_torch_version"},
}

MAINS: Final[Mapping[str, tuple[str, ...]]] = {
    "commands.accelerate_cli": (),
    "commands.config": ("config",),
    "commands.config.config": ("config",),
    "commands.env": ("env",),
    "commands.estimate": ("estimate-memory",),
    "commands.launch": ("launch",),
    "commands.merge": ("merge-weights",),
    "commands.test": ("test",),
    "commands.tpu": ("tpu-config",),
}
"""The modules whose `main` is a command of Accelerate: the first words of ours that takes its place."""


def has_main(path: str) -> bool:
    """Return True for a module that is a program too."""
    return path in MAINS or "main" in _read_row(path)


def is_path(path: str) -> bool:
    """Return True for a module of Accelerate that is served, named without `accelerate.`."""
    return path in PATHS


def is_package(path: str) -> bool:
    """Return True for a module with others inside it."""
    return any(other.startswith(f"{path}." if path else "") and other != path for other in PATHS)


def find(path: str, name: str) -> tuple[str, str] | None:
    """Return the module here that has a name, and its name there; None for a name that Accelerate does not have.

    Its modules import much of each other, and code takes names from any of them: a name that the module itself does not
    define is that of the module which does.

    Args:
        path: of a module of Accelerate, without `accelerate.`.
        name: asked of it.
    """
    return _read_row(path).get(name) or _read_all().get(name)


def names_of(path: str) -> list[str]:
    """Return the names that a module of Accelerate defines; `utils` has those of all modules in it.

    Args:
        path: see `find`.
    """
    inner = [other for other in PATHS if path == "utils" and other.startswith("utils.")]
    return sorted({name for row in (path, *inner) for name in _read_row(row)})


@functools.cache
def _read_row(path: str) -> dict[str, tuple[str, str]]:
    words = [(module, word.partition("=")) for module, text in PATHS[path].items() for word in text.split()]
    return {name: (module, own or name) for module, (name, _, own) in words}


@functools.cache
def _read_all() -> dict[str, tuple[str, str]]:
    own = (path for path in PATHS if not path.startswith("test_utils"))  # which has names such as `skip`
    return {name: found for path in own for name, found in _read_row(path).items()}
