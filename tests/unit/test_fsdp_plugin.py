"""Tests for what says how models are spread: spellings of both versions, variables, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, LaunchConfig, ParallelismConfig, notebook_launcher
from notebook_accel.config.export import environment
from notebook_accel.config.schema import chosen_names
from notebook_accel.environ import patch_environment
from notebook_accel.fsdp import FullyShardedDataParallelPlugin as Plugin
from notebook_accel.parallelism import TorchContextParallelConfig, TorchTensorParallelConfig
from notebook_accel.utils import (
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
)
from tests.unit import gpt
from tests.unit.multiprocess import run_ranks


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "FULL_SHARD"),
        ({"fsdp_version": 2}, "FULL_SHARD"),
        ({"fsdp_version": 2, "reshard_after_forward": False}, "SHARD_GRAD_OP"),
        ({"fsdp_version": 2, "reshard_after_forward": "false"}, "SHARD_GRAD_OP"),
        ({"reshard_after_forward": "hybrid_shard"}, "HYBRID_SHARD"),
        ({"sharding_strategy": 2}, "SHARD_GRAD_OP"),
        ({"sharding_strategy": "3"}, "NO_SHARD"),
        ({"sharding_strategy": "hybrid_shard_zero2", "fsdp_version": 2}, "HYBRID_SHARD_ZERO2"),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": True}, "HYBRID_SHARD"),
    ],
)
def test_both_spellings_of_what_is_sharded(options: dict[str, Any], strategy: str) -> None:
    assert Plugin(**options).strategy == strategy


def test_types_and_defaults_are_those_of_the_version() -> None:
    from torch.distributed import fsdp

    first, second = Plugin(cpu_offload=True), Plugin(fsdp_version=2, cpu_offload=True)
    assert first.sharding_strategy is fsdp.ShardingStrategy.FULL_SHARD and first.offloads
    assert first.state_dict_type is fsdp.StateDictType.FULL_STATE_DICT and not first.saves_shards
    assert isinstance(first.cpu_offload, fsdp.CPUOffload)
    assert isinstance(second.cpu_offload, fsdp.CPUOffloadPolicy) and second.offloads
    assert second.reshard_after_forward is True and second.saves_shards
    second.set_state_dict_type("full_state_dict")
    assert isinstance(second.state_dict_config, fsdp.FullStateDictConfig)
    assert Plugin(backward_prefetch="backward_pre").prefetches_backward
    assert not Plugin(backward_prefetch="no_prefetch").prefetches_backward
    half = torch.bfloat16
    assert Plugin(mixed_precision_policy="bf16").mixed_precision_policy == fsdp.MixedPrecision(
        half, half, half
    )
    policy = Plugin(fsdp_version=2, mixed_precision_policy={"param_dtype": "bf16"}).mixed_precision_policy
    assert policy == fsdp.MixedPrecisionPolicy(param_dtype=half)
    second.set_auto_wrap_policy(nn.Linear(2, 2))
    assert second.auto_wrap_policy is None


GUIDE = Path(__file__).parent / "configs" / "fsdp_transformers_guide.yaml"


def test_what_a_config_says_arrives() -> None:
    config = LaunchConfig.read(GUIDE)
    with patch_environment(**environment(config, chosen_names(config))):
        plugin = Plugin()
    assert plugin.transformer_cls_names_to_wrap == ["BertLayer"] and plugin.saves_shards
    assert plugin.cpu_ram_efficient_loading and plugin.sync_module_states and plugin.use_orig_params
    assert (plugin.strategy, plugin.prefetches_backward, plugin.forward_prefetch) == (
        "FULL_SHARD",
        True,
        False,
    )
    with patch_environment(PARALLELISM_CONFIG_TP_SIZE=2, PARALLELISM_CONFIG_DP_SHARD_SIZE=4):
        assert repr(ParallelismConfig(cp_size=1)) == (
            "ParallelismConfig(dp_replicate_size=1, dp_shard_size=4, cp_size=1, sp_size=1, tp_size=2)"
        )
    with patch_environment(ACCELERATE_USE_FSDP="false", FSDP_CPU_RAM_EFFICIENT_LOADING="no"):
        enable_fsdp_ram_efficient_loading()
        assert Plugin().cpu_ram_efficient_loading
        disable_fsdp_ram_efficient_loading()
        assert not Plugin().cpu_ram_efficient_loading


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fsdp_version": 3}, "fsdp_version 3 is unknown, choose 1 or 2"),
        ({"sharding_strategy": "SOME"}, "sharding_strategy 'SOME' is unknown, choose among FULL_SHARD"),
        ({"sharding_strategy": 6}, "sharding_strategy 6 is unknown"),
        ({"reshard_after_forward": False, "sharding_strategy": "FULL_SHARD"}, "contradict each other"),
        ({"reshard_after_forward": "NO_SHARD", "sharding_strategy": 1}, "contradict each other"),
        ({"backward_prefetch": "EARLY"}, "BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH"),
        ({"auto_wrap_policy": "some"}, "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy 3 is neither"),
        ({"min_num_params": "1e8"}, "min_num_params '1e8' is no whole number"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "Choose SHARDED_STATE_DICT or FULL_STATE_DICT"),
        ({"cpu_offload": "yes"}, "cpu_offload 'yes' is neither True, False"),
        ({"mixed_precision_policy": "bf8"}, "mixed precision 'bf8' is unknown, choose among fp8, fp16"),
        ({"mixed_precision_policy": {"dtype": "bf16"}}, "mixed_precision_policy has dtype"),
        ({"mixed_precision_policy": 16}, "mixed_precision_policy 16 is neither"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "Leave one of them out"),
        ({"activation_checkpointing": True}, "activation_checkpointing with auto_wrap_policy NO_WRAP"),
        ({"activation_checkpointing": "maybe"}, "activation_checkpointing: 'maybe' is neither true"),
        ({"forward_prefetch": 2}, "forward_prefetch 2 is neither True nor False"),
        ({"min_num_params": -1}, "min_num_params -1 is no whole number"),
        ({"auto_wrap_policy": nn.Linear}, "Linear'> is neither a function nor one of"),
        ({"transformer_cls_names_to_wrap": [nn.Linear]}, "Linear'>.* is no list of class names"),
        ({"ignored_modules": "["}, r"ignored_modules '\[' is no regular expression: unterminated"),
        ({"ignored_modules": nn.Linear(1, 1)}, "ignored_modules of type Linear is neither a list"),
        ({"ignored_modules": ["head"]}, "ignored_modules holds 'head', which is no module"),
        ({"param_init_fn": "zeros"}, "param_init_fn 'zeros' is no function of a module"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Plugin(**options)


def test_flags_may_be_words_or_numbers_and_what_is_not_looked_at_is_said() -> None:
    plugin = Plugin(forward_prefetch="false", use_orig_params=1, sync_module_states="no")  # type: ignore[arg-type]
    assert (plugin.forward_prefetch, plugin.use_orig_params, plugin.sync_module_states) == (
        False,
        True,
        False,
    )
    layers = [nn.Linear(1, 1)]
    assert Plugin(ignored_modules=iter(layers)).ignored_modules == layers
    with pytest.warns(
        UserWarning, match="transformer_cls_names_to_wrap is not looked at.* TRANSFORMER_BASED"
    ):
        Plugin(transformer_cls_names_to_wrap=["Block"])


def test_a_launch_refuses_sizes_that_are_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("use_cpu: true\nparallelism_config:\n  parallelism_config_tp_size: 3\n")
    with pytest.raises(ValueError, match="tp 3 != world 2"):
        notebook_launcher(print, num_processes=2, config=path)
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "two"}
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_TP_SIZE"):
        notebook_launcher(print, num_processes=2, environment=variables)
    path.write_text("use_cpu: true\nparallelism_config:\n  parallelism_config_sp_size: 2\n")
    with pytest.raises(
        ValueError, match=r"sp_size above 1 .*\(sp 2\): DeepSpeed's sequence parallel \(Ulysses"
    ):
        notebook_launcher(print, num_processes=2, config=path)
    with pytest.raises(TypeError, match="plan 'colwise' is no dict of module names and styles"):
        TorchTensorParallelConfig(plan="colwise")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 0}, "tp_size 0 is no whole number from 1 on"),
        ({"cp_backend": "other"}, "cp_backend 'other' is unknown"),
        ({"cp_size": 2, "sp_size": 2}, r"\(cp 2 x sp 2\): both split the sequences, and exclude each other"),
        ({"dp_replicate_size": 2, "tp_size": 2}, r"\(dp_replicate 2 x tp 2\): copies with tensor"),
        ({"tp_handler": TorchTensorParallelConfig()}, "tp_handler is given and tp_size is 1"),
    ],
)
def test_wrong_sizes_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ParallelismConfig(**options)


def test_sizes_and_dimensions() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=4)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (24, 6, 4)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert (config.fsdp_dim_names, config.non_dp_dim_names) == (["dp_replicate", "dp_shard_cp"], ["tp"])
    assert config.dp_cp_dim_names == config.dp_dim_names and config.dp_shard_cp_dim_names == ["dp_shard"]
    assert config.to_json()["tp_handler"] == {"enable_async_tp": False, "plan": None}
    assert TorchContextParallelConfig().cp_comm_strategy == "allgather" and not config.sp_enabled
    with pytest.raises(ValueError, match="cp_comm_strategy 'ring' is unknown"):
        TorchContextParallelConfig(cp_comm_strategy="ring")
    with pytest.raises(ValueError, match="dp_replicate 2 x dp_shard 3 x tp 4 != world 6"):
        config.check(6)
    with pytest.raises(ValueError, match="enable_async_tp"):
        TorchTensorParallelConfig(enable_async_tp=True)
    with pytest.raises(ValueError, match="there is no mesh yet"):
        config.get_device_mesh()


def alone() -> None:
    """A group of one is opened for one process, and closed in the end."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"))
    assert accelerator.is_fsdp2 and accelerator.state.is_fsdp2 and accelerator.distributed_type == "FSDP"
    assert Accelerator().state.fsdp_plugin is accelerator.state.fsdp_plugin, "a later one takes it over"
    built = gpt.GPT(width=16, layers=1, tied=False)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in built.state_dict().items()}
    addresses = {name: parameter.data_ptr() for name, parameter in built.named_parameters()}
    prepared = fsdp2_prepare_model(accelerator, built)
    fsdp2_switch_optimizer_parameters(
        optimizer, {addresses[name]: parameter for name, parameter in prepared.named_parameters()}
    )
    assert optimizer.param_groups[0]["params"] == list(prepared.parameters())
    with pytest.raises(KeyError, match="training would not change it"):
        fsdp2_switch_optimizer_parameters(optimizer, {})
    fsdp2_load_full_state_dict(accelerator, prepared, {name: value + 1 for name, value in before.items()})
    after = accelerator.get_state_dict(prepared)
    torch.testing.assert_close(after, {name: value + 1 for name, value in before.items()})
    with pytest.raises(ValueError, match=r"see 'blocks\.0\.down\.bias'"):
        fsdp2_load_full_state_dict(accelerator, prepared, {})
    accelerator.end_training()
    assert not torch.distributed.is_initialized()


def test_one_process_and_pieces_by_hand() -> None:
    run_ranks(alone, world_size=1)


@pytest.mark.parametrize(
    ("sizes", "names", "shape"),
    [
        ({"dp_shard_size": 8}, ("dp_shard",), (8,)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, ("dp_replicate", "dp_shard"), (2, 4)),
        ({"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, ("dp_shard", "cp", "tp"), (2, 2, 2)),
        ({}, (), ()),
    ],
)
def test_the_mesh_has_the_kinds_of_more_than_one_process(
    sizes: dict[str, int], names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    assert ParallelismConfig(**sizes)._get_mesh() == (names, shape)
