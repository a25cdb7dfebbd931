"""The sections of a config: what belongs to one library or one way of training."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from .option import Read, Row, any_case, option, rows_of

Word = Annotated[str, Read(lambda value: ",".join(value) if isinstance(value, list) else value)]
"""A text; a list becomes a text with commas."""

_as_number = Read(lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value)
"""A number may be quoted."""

_COMPILED = {"dynamo_config.dynamo_backend": ("!NO",)}
_CONTEXT = {"parallelism_config.parallelism_config_cp_size": (">1",)}
_SEQUENCE = {"parallelism_config.parallelism_config_sp_size": (">1",)}
_DEVICES = any_case(none="none", cpu="cpu", nvme="nvme")
_RECOMPUTE = Literal["selective", "full"]


class Section(BaseModel):
    """Options that belong together: pydantic's model of rows.

    Subclasses say how their options are called elsewhere: `prefix` is what their names begin with in the file,
    `flag_prefix` what their flags begin with in place of it, `env_prefix` what their variables begin with.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=False)
    rows: ClassVar[dict[str, Row]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give pydantic a field for each row."""
        super().__init_subclass__(**kwargs)
        rows = rows_of(cls)
        cls.rows = {name: row for name, row in rows.items() if getattr(cls, name, None) is row}
        for name, row in cls.rows.items():
            setattr(cls, name, Field(default=row.default, description=row.help, **row.bounds))


class DynamoConfig(Section):
    """torch.compile."""

    prefix: ClassVar[str] = "dynamo_"
    flag_prefix: ClassVar[str] = "dynamo_"
    env_prefix: ClassVar[str] = "ACCELERATE_DYNAMO_"

    dynamo_backend: Annotated[
        Literal[
            "NO",
            "EAGER",
            "AOT_EAGER",
            "INDUCTOR",
            "AOT_TS_NVFUSER",
            "NVPRIMS_NVFUSER",
            "CUDAGRAPHS",
            "OFI",
            "FX2TRT",
            "ONNXRT",
            "TENSORRT",
            "AOT_TORCHXLA_TRACE_ONCE",
            "TORCHXLA_TRACE_ONCE",
            "TVM",
        ],
        any_case(torhchxla_trace_once="TORCHXLA_TRACE_ONCE"),
    ] = option("NO", "What torch.compile compiles models with; NO leaves them as they are.")
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune"] = option(
        "default",
        "What torch.compile optimizes for.",
        when=_COMPILED,
    )
    dynamo_use_fullgraph: bool = option(
        False, "A model that is no single graph is an error.", when=_COMPILED, expert=True
    )
    dynamo_use_dynamic: bool = option(
        False, "Compile for any shape instead of once for each.", when=_COMPILED, expert=True
    )
    dynamo_use_regional_compilation: bool = option(
        False, "Compile repeated blocks of the model one by one, which compiles faster.", when=_COMPILED
    )


class FSDPConfig(Section):
    """FSDP: models sharded by torch."""

    prefix: ClassVar[str] = "fsdp_"
    flag_prefix: ClassVar[str] = "fsdp_"
    env_prefix: ClassVar[str] = "FSDP_"
    when: ClassVar[dict[str, Any]] = {"distributed_type": ("FSDP",)}

    fsdp_version: Annotated[Literal[1, 2], _as_number] = option(
        1, "How options are spelled: 1 or 2. Both shard by torch's fully_shard."
    )
    fsdp_sharding_strategy: Annotated[
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"],
        any_case(
            **{
                "1": "FULL_SHARD",
                "2": "SHARD_GRAD_OP",
                "3": "NO_SHARD",
                "4": "HYBRID_SHARD",
                "5": "HYBRID_SHARD_ZERO2",
            }
        ),
    ] = option(
        "FULL_SHARD",
        "What is sharded: weights, gradients and optimizer state, or less of it; HYBRID shards within a node.",
        when={"fsdp_config.fsdp_version": (1,)},
    )
    fsdp_reshard_after_forward: bool | Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = option(
        True,
        "Free the gathered weights after forward, which saves memory and costs another gather in backward.",
    )
    fsdp_auto_wrap_policy: Annotated[
        Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"], any_case()
    ] = option("TRANSFORMER_BASED_WRAP", "Which modules are sharded each on their own.", quiet=True)
    fsdp_transformer_layer_cls_to_wrap: Word | None = option(
        None,
        "Class names of the layers to shard one by one, separated by commas; by default those the model names.",
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        when={"fsdp_config.fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",)},
    )
    fsdp_min_num_params: int = option(
        100_000_000,
        "Parameters from which on a module is sharded on its own.",
        ge=0,
        when={"fsdp_config.fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP",)},
    )
    fsdp_offload_params: bool = option(False, "Keep weights and gradients in the CPU's memory.")
    fsdp_state_dict_type: Annotated[
        Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"], any_case()
    ] = option(
        "SHARDED_STATE_DICT",
        "How checkpoints are written: by each process its part, or one whole.",
        quiet=True,
    )
    fsdp_cpu_ram_efficient_loading: bool = option(
        True, "Rank 0 alone reads pretrained weights, the others get their part from it."
    )
    fsdp_sync_module_states: bool = option(True, "Start with rank 0's weights on all processes.", expert=True)
    fsdp_backward_prefetch: Annotated[Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"], any_case()] = (
        option(
            "BACKWARD_PRE",
            "When the next weights are gathered in backward.",
            when={"fsdp_config.fsdp_version": (1,)},
            expert=True,
        )
    )
    fsdp_forward_prefetch: bool = option(False, "Gather the next weights early in forward.", expert=True)
    fsdp_use_orig_params: bool = option(
        True, "Allow parameters of which some are frozen within a sharded module.", expert=True
    )
    fsdp_activation_checkpointing: bool = option(
        False, "Compute activations again in backward instead of keeping them."
    )
    fsdp_activation_checkpointing_offload: bool = option(
        False,
        "Keep what is left of activations in the CPU's memory.",
        when={"fsdp_config.fsdp_activation_checkpointing": (True,)},
        expert=True,
    )
    fsdp_ignored_modules: Word | None = option(
        None, "Modules that are not sharded, by a pattern of their names.", flag=None, expert=True
    )


class DeepSpeedConfig(Section):
    """DeepSpeed."""

    env_prefix: ClassVar[str] = "ACCELERATE_DEEPSPEED_"
    when: ClassVar[dict[str, Any]] = {"distributed_type": ("DEEPSPEED",)}

    deepspeed_config_file: str | None = option(
        None,
        "DeepSpeed's own config file, as JSON; it says what the options below would.",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
    )
    zero_stage: Annotated[Literal[0, 1, 2, 3], _as_number] = option(
        2, "What ZeRO shards: 1 optimizer state, 2 gradients too, 3 weights too.", quiet=True
    )
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = option(
        None,
        "Batches for each optimizer step; by default what the option of this name above says.",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    )
    gradient_clipping: Annotated[float, Field(ge=0)] | Literal["auto"] | None = option(
        None, "Largest norm of the gradients.", env="ACCELERATE_GRADIENT_CLIPPING"
    )
    offload_optimizer_device: Annotated[Literal["none", "cpu", "nvme"], _DEVICES] = option(
        "none", "Where optimizer state is kept instead of the device.", quiet=True
    )
    offload_param_device: Annotated[Literal["none", "cpu", "nvme"], _DEVICES] = option(
        "none",
        "Where weights are kept instead of the device.",
        quiet=True,
        when={"deepspeed_config.zero_stage": (3,)},
    )
    offload_optimizer_nvme_path: str | None = option(
        None,
        "Folder for optimizer state on NVMe.",
        when={"deepspeed_config.offload_optimizer_device": ("nvme",)},
    )
    offload_param_nvme_path: str | None = option(
        None,
        "Folder for weights on NVMe.",
        when={"deepspeed_config.offload_param_device": ("nvme",)},
    )
    zero3_init_flag: bool | None = option(
        None,
        "Make large models sharded from the start.",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        when={"deepspeed_config.zero_stage": (3,)},
    )
    zero3_save_16bit_model: bool | None = option(
        None, "Save 16-bit weights from ZeRO 3.", when={"deepspeed_config.zero_stage": (3,)}
    )
    deepspeed_hostfile: str | None = option(
        None, "DeepSpeed's file of nodes.", env="", when={"num_machines": (">1",)}, expert=True
    )
    deepspeed_exclusion_filter: str | None = option(
        None, "Nodes and devices to leave out.", env="", expert=True
    )
    deepspeed_inclusion_filter: str | None = option(None, "Nodes and devices to use.", env="", expert=True)
    deepspeed_multinode_launcher: (
        Literal["pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh"] | None
    ) = option(None, "What starts DeepSpeed on the other nodes.", env="", expert=True)
    deepspeed_moe_layer_cls_names: Word | None = option(
        None,
        "Class names of mixture-of-experts layers, separated by commas.",
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        expert=True,
    )


class FP8Config(Section):
    """Float8."""

    prefix: ClassVar[str] = ""
    flag_prefix: ClassVar[str] = "fp8_"
    env_prefix: ClassVar[str] = "ACCELERATE_FP8_"
    when: ClassVar[dict[str, Any]] = {"mixed_precision": ("fp8",)}

    backend: Annotated[Literal["AO", "TE", "MSAMP"], any_case(**{"ms-amp": "MSAMP"})] = option(
        "AO", "Library: torchao (AO), Transformer Engine (TE) or MS-AMP."
    )
    use_autocast_during_eval: bool = option(
        False, "Float8 in evaluation too.", when={"fp8_config.backend": ("TE",)}
    )
    margin: int = option(
        0, "Margin of the scaling factors.", when={"fp8_config.backend": ("TE",)}, expert=True
    )
    interval: int = option(
        1, "Steps between two scaling factors.", ge=1, when={"fp8_config.backend": ("TE",)}, expert=True
    )
    fp8_format: Annotated[Literal["HYBRID", "E4M3", "E5M2"], any_case()] = option(
        "HYBRID",
        "Format of the numbers.",
        flag="fp8_format",
        env="ACCELERATE_FP8_FORMAT",
        when={"fp8_config.backend": ("TE",)},
    )
    amax_history_len: int = option(
        1024, "Steps whose largest values count.", ge=1, when={"fp8_config.backend": ("TE",)}, expert=True
    )
    amax_compute_algo: Literal["max", "most_recent"] = option(
        "most_recent", "How the largest value is chosen.", when={"fp8_config.backend": ("TE",)}, expert=True
    )
    override_linear_precision: tuple[bool, bool, bool] = option(
        (False, False, False),
        "Higher precision for forward, data gradient and weight gradient of linear layers.",
        when={"fp8_config.backend": ("TE",)},
        env="",
        expert=True,
    )
    opt_level: Literal["O1", "O2"] = option(
        "O2", "How much MS-AMP keeps in float8.", when={"fp8_config.backend": ("MSAMP",)}
    )
    enable_fsdp_float8_all_gather: bool = option(
        True, "Send sharded weights in float8.", when={"fp8_config.backend": ("AO",)}
    )
    pad_inner_dim: bool = option(
        True, "Pad inputs of float8 layers to sizes the hardware takes.", when={"fp8_config.backend": ("AO",)}
    )


class ParallelismSizes(Section):
    """Parallelism of several kinds over one mesh of processes."""

    prefix: ClassVar[str] = "parallelism_config_"
    flag_prefix: ClassVar[str] = "parallelism_config_"
    env_prefix: ClassVar[str] = "PARALLELISM_CONFIG_"
    when: ClassVar[dict[str, Any]] = {"use_parallelism_config": (True,)}

    parallelism_config_dp_replicate_size: int = option(1, "Copies of the whole model.", ge=1)
    parallelism_config_dp_shard_size: int = option(1, "Processes over which a copy is sharded.", ge=1)
    parallelism_config_tp_size: int = option(1, "Processes that share each layer (tensor parallel).", ge=1)
    parallelism_config_cp_size: int = option(
        1, "Processes that share each sequence (context parallel).", ge=1
    )
    parallelism_config_cp_backend: Literal["torch"] = option(
        "torch", "Implementation of context parallel.", expert=True
    )
    parallelism_config_cp_comm_strategy: Literal["allgather", "alltoall"] = option(
        "allgather", "How context parallel exchanges keys and values.", when=_CONTEXT, expert=True
    )
    parallelism_config_sp_size: int = option(
        1, "Processes that share each sequence (sequence parallel).", ge=1
    )
    parallelism_config_sp_backend: Literal["deepspeed"] = option(
        "deepspeed", "Implementation of sequence parallel.", expert=True
    )
    parallelism_config_sp_seq_length: int | None = option(
        None, "Length of the sequences.", ge=1, when=_SEQUENCE, expert=True
    )
    parallelism_config_sp_seq_length_is_variable: bool = option(
        True, "Sequences differ in length from batch to batch.", when=_SEQUENCE, expert=True
    )
    parallelism_config_sp_attn_implementation: str = option(
        "sdpa", "Attention that sequence parallel calls.", when=_SEQUENCE, expert=True
    )


class MegatronConfig(Section):
    """Megatron-LM.

    Its options are only passed on: the library is not part of this package.
    """

    prefix: ClassVar[str] = "megatron_lm_"
    flag_prefix: ClassVar[str] = "megatron_lm_"
    env_prefix: ClassVar[str] = "MEGATRON_LM_"
    when: ClassVar[dict[str, Any]] = {"distributed_type": ("MEGATRON_LM",)}
    expert: ClassVar[bool] = True

    megatron_lm_tp_degree: int = option(1, "Tensor parallel degree.", ge=1)
    megatron_lm_pp_degree: int = option(1, "Pipeline parallel degree.", ge=1)
    megatron_lm_num_micro_batches: int | None = option(None, "Micro-batches of a batch.", ge=1)
    megatron_lm_sequence_parallelism: bool | None = option(None, "Sequence parallel.")
    megatron_lm_recompute_activations: bool | None = option(None, "Compute activations again in backward.")
    megatron_lm_use_distributed_optimizer: bool | None = option(None, "Shard the optimizer's state.")
    megatron_lm_gradient_clipping: float = option(1.0, "Largest norm of the gradients; 0 for none.", ge=0)
    megatron_lm_use_custom_fsdp: bool = option(False, "Megatron's own FSDP.")
    megatron_lm_no_load_optim: bool = option(False, "Do not load the optimizer.")
    megatron_lm_no_save_optim: bool = option(False, "Do not save the optimizer.")
    megatron_lm_eod_mask_loss: bool = option(False, "No loss at the ends of documents.")
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = option(
        False, "Copy to and from the CPU's optimizer early."
    )
    megatron_lm_optimizer_cpu_offload: bool = option(False, "Optimizer on the CPU.")
    megatron_lm_use_precision_aware_optimizer: bool = option(False, "Optimizer state of lower precision.")
    megatron_lm_decoder_last_pipeline_num_layers: int | None = option(
        None, "Layers of the last pipeline stage."
    )
    megatron_lm_recompute_granularity: _RECOMPUTE | None = option(None, "What is computed again.")
    megatron_lm_recompute_method: Literal["uniform", "block"] | None = option(None, "How it is divided.")
    megatron_lm_recompute_num_layers: int | None = option(None, "Layers computed again together.", ge=1)
    megatron_lm_attention_backend: str | None = option(None, "Implementation of attention.")
    megatron_lm_expert_model_parallel_size: int | None = option(None, "Expert parallel size.", ge=1)
    megatron_lm_context_parallel_size: int | None = option(None, "Context parallel size.", ge=1)
    megatron_lm_attention_dropout: float | None = option(None, "Dropout of attention.", ge=0, le=1)
    megatron_lm_hidden_dropout: float | None = option(None, "Dropout of hidden layers.", ge=0, le=1)
    megatron_lm_attention_softmax_in_fp32: bool | None = option(None, "Softmax in float32.")
    megatron_lm_expert_tensor_parallel_size: int | None = option(
        None, "Tensor parallel size of experts.", ge=1
    )
    megatron_lm_calculate_per_token_loss: bool | None = option(None, "Loss divided by tokens.")
    megatron_lm_use_rotary_position_embeddings: bool | None = option(None, "Rotary position embeddings.")


class MPIConfig(Section):
    """MPI: nodes of CPUs started by mpirun."""

    prefix: ClassVar[str] = ""

    mpirun_hostfile: str | None = option(None, "mpirun's file of nodes.", expert=True)
    mpirun_ccl: int = option(1, "Workers of oneCCL on each node.", flag=None, expert=True)
