"""What a config file tells processes: what `accelerate launch` does, every difference with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel.cli.launch import launch
from notebook_accel.cli.plan import resolve
from notebook_accel.config import launch as by_config

theirs_launch = pytest.importorskip("accelerate.commands.launch")
theirs_env = pytest.importorskip("accelerate.utils.launch")

FILE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nmachine_rank: 0\nnum_processes: 2\n"
GPU = FILE + "use_cpu: false\nmixed_precision: bf16\ndistributed_type: "
FP8 = GPU.replace("bf16", "fp8") + "MULTI_GPU\nfp8_config:\n  backend: "
CASES = {
    "cpu": FILE + "use_cpu: true\nmixed_precision: bf16\ndistributed_type: MULTI_CPU\n",
    "gpu": GPU + "MULTI_GPU\ngpu_ids: 0,1\ndebug: true\nenable_cpu_affinity: true\n",
    "fsdp1": GPU
    + """FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
""",
    "fsdp1 bare": GPU + "FSDP\n",
    "fsdp2": GPU
    + """FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000
  fsdp_offload_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_activation_checkpointing: true
  fsdp_activation_checkpointing_offload: true
  fsdp_cpu_ram_efficient_loading: false
""",
    "deepspeed": GPU
    + """DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
""",
    "deepspeed file": GPU.replace("bf16", "'no'")
    + "DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero3.json\n  zero3_init_flag: true\n",
    "fp8 AO": FP8 + "AO\n  pad_inner_dim: false\n",
    "fp8 TE": FP8 + "TE\n  margin: 2\n  fp8_format: E4M3\n  override_linear_precision: [true, false, true]\n",
    "fp8 MSAMP": FP8 + "MSAMP\n  opt_level: O1\n",
    "dynamo": GPU
    + "MULTI_GPU\ndynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n"
    + "  dynamo_use_dynamic: true\n  dynamo_use_fullgraph: true\n",
    "parallelism": GPU
    + """FSDP
fsdp_config:
  fsdp_version: 2
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
""",
    "megatron": GPU
    + """MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: false
  megatron_lm_tp_degree: 1
  megatron_lm_use_distributed_optimizer: true
""",
}
DYNAMO = [f"ACCELERATE_DYNAMO_{name}" for name in ("MODE", "USE_FULLGRAPH", "USE_DYNAMIC")]
REASONS: dict[str, dict[str, list[str]]] = {
    "the file says use_cpu: false, which counts more than an inherited variable": {
        name: ["ACCELERATE_USE_CPU"] for name in CASES if name != "cpu"
    },
    "nothing is compiled, so how does not matter": {
        name: [*DYNAMO, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"]
        for name in CASES
        if name not in ("dynamo", "deepspeed", "deepspeed file")
    },
    "Accelerator reads it beside DeepSpeed too": {
        name: ["ACCELERATE_DYNAMO_BACKEND"] for name in ("deepspeed", "deepspeed file")
    },
    "gloo would try each interface otherwise": {name: ["GLOO_SOCKET_IFNAME"] for name in CASES},
    "it would put the threads of all processes on the same cores, and only Intel's OpenMP reads it": {
        "cpu": ["KMP_AFFINITY", "KMP_BLOCKTIME"]
    },
    "torch elastic sets it for each process; Accelerate starts CPU processes by mpirun, or one": {
        "cpu": ["MASTER_ADDR", "MASTER_PORT"]
    },
    "Accelerate drops the file's word, because its flag has a default": {"gpu": ["ACCELERATE_CPU_AFFINITY"]},
    "Accelerate no longer reads the name that its own guide has": {"fsdp1": ["FSDP_BACKWARD_PREFETCH"]},
    "torch's own default; without a word Accelerate gathers nothing early": {
        "fsdp1 bare": ["FSDP_BACKWARD_PREFETCH"]
    },
    "without a meaning beside the version, the policy, or checkpointing that is off": {
        "fsdp1": ["FSDP_MIN_NUM_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"],
        "fsdp1 bare": ["FSDP_MIN_NUM_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"],
        "fsdp2": ["FSDP_SHARDING_STRATEGY"],
        "parallelism": [
            "FSDP_MIN_NUM_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "FSDP_SHARDING_STRATEGY",
        ],
    },
    "each process's share of the cores, where Accelerate leaves it to torchrun": {
        name: ["OMP_NUM_THREADS"] for name in ("deepspeed", "deepspeed file")
    },
    "only used to refuse names that DeepSpeed's file may have too": {
        name: ["ACCELERATE_CONFIG_DS_FIELDS"] for name in ("deepspeed", "deepspeed file")
    },
    "a script imports what it would without a launcher": {
        name: ["PYTHONPATH"] for name in ("deepspeed", "deepspeed file")
    },
    "an option of another fp8 library": {
        "fp8 AO": [f"ACCELERATE_FP8_{name}" for name in (
            "AMAX_COMPUTE_ALGO", "AMAX_HISTORY_LEN", "FORMAT", "INTERVAL", "MARGIN", "OPT_LEVEL", "OVERRIDE_DGRAD",
            "OVERRIDE_FPROP", "OVERRIDE_WGRAD", "USE_AUTOCAST_DURING_EVAL",
        )],
        "fp8 TE": [
            f"ACCELERATE_FP8_{name}" for name in ("ENABLE_FSDP_FLOAT8_ALL_GATHER", "OPT_LEVEL", "PAD_INNER_DIM")
        ],
        "fp8 MSAMP": [f"ACCELERATE_FP8_{name}" for name in (
            "AMAX_COMPUTE_ALGO", "AMAX_HISTORY_LEN", "ENABLE_FSDP_FLOAT8_ALL_GATHER", "FORMAT", "INTERVAL", "MARGIN",
            "OVERRIDE_DGRAD", "OVERRIDE_FPROP", "OVERRIDE_WGRAD", "PAD_INNER_DIM", "USE_AUTOCAST_DURING_EVAL",
        )],
    },
}  # fmt: skip
SAME = {"1": "true", "0": "false"}  # as their readers take them


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two GPUs, no default config, and an environment that says nothing."""
    for name in [
        n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP_"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr("notebook_accel.launch.checks.addresses.find_loopback_interface", lambda: "lo")
    monkeypatch.setattr(theirs_env, "is_fp8_available", lambda: True)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")


def theirs(path: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what `accelerate launch` would set in processes, by its own functions, without starting any."""
    found: dict[str, str] = {}
    whole = {
        "multi_gpu_launcher": lambda args: theirs_env.prepare_multi_gpu_env(args),
        "simple_launcher": lambda args: theirs_env.prepare_simple_launcher_cmd_env(args)[1],
        "deepspeed_launcher": lambda args: theirs_env.prepare_deepspeed_cmd_env(args)[1],
    }
    for name, prepare in whole.items():
        monkeypatch.setattr(theirs_launch, name, lambda args, prepare=prepare: found.update(prepare(args)))
    words = ["--config_file", path, "--main_process_port", "0", "train.py"]
    theirs_launch.launch_command(theirs_launch.launch_command_parser().parse_args(words))
    return {name: text for name, text in found.items() if os.environ.get(name) != text}


def ours(path: str) -> dict[str, str]:
    with launch.make_context("launch", ["train.py"]) as ctx:
        plan = resolve(ctx.params, path)[0]
    assert not plan.doubts
    return {**plan.environment, **plan.derived}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    def value(texts: Mapping[str, str], name: str) -> Any:
        text = texts[name].lower() if name in texts else None
        return SAME.get(str(text), text) if name not in ("FSDP_VERSION",) else text

    return {name for name in ours.keys() | theirs.keys() if value(ours, name) != value(theirs, name)}


@pytest.mark.parametrize("name", CASES)
def test_processes_are_told_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("c.yaml").write_text(CASES[name])
    mine, reference = ours("c.yaml"), theirs("c.yaml", monkeypatch)
    assert "ACCELERATE_MIXED_PRECISION" in reference, "its functions were called"
    expected = {variable for cases in REASONS.values() for variable in cases.get(name, [])}
    found = {each: (mine.get(each), reference.get(each)) for each in differing(mine, reference)}
    assert found.keys() == expected, {each: found.get(each) for each in found.keys() ^ expected}


@pytest.mark.parametrize("name", CASES)
def test_a_launch_from_a_cell_tells_what_the_command_does(name: str) -> None:
    Path("c.yaml").write_text(CASES[name])
    cell = by_config.arguments(by_config.find_config("c.yaml"), ())
    told = {**cell.environment, "ACCELERATE_MIXED_PRECISION": cell.values.get("mixed_precision", "no")}
    mine = ours("c.yaml")
    assert differing(mine, told) == {"GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"}, (
        "which the launch itself fills in"
    )
