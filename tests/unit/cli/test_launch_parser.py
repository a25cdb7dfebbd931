"""Tests for the parser and the function of `launch` that programs call."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rich_click as click
from accelerate.commands import launch as reference

from notebook_accel.cli import launch_parser
from notebook_accel.cli.launch_parser import (
    launch_command,
    launch_command_parser,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
    validate_launch_command,
)
from notebook_accel.errors import ConfigError

SCRIPT = (
    "import os, sys; print(sys.argv[1:], os.environ.get('RANK'), os.environ['ACCELERATE_MIXED_PRECISION'])"
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT + "\nif 'fail' in sys.argv: sys.exit(3)\n")
    return str(path)


def parse(*words: str) -> dict[str, Any]:
    return vars(launch_command_parser().parse_args([*words, "train.py", "--lr", "1"]))


def test_a_namespace_has_what_accelerates_has() -> None:
    left_out = {"nondefault"}  # for its own command
    theirs = vars(reference.launch_command_parser().parse_args(["train.py"]))
    assert theirs.keys() - left_out <= parse().keys()
    words = ["--num_processes", "4", "--multi_gpu", "--mixed_precision=bf16", "--module", "--gpu_ids", "0,1"]
    theirs = vars(reference.launch_command_parser().parse_args([*words, "train.py", "--lr", "1"]))
    ours = parse(*words)
    named = ("num_processes", "multi_gpu", "mixed_precision", "module", "gpu_ids")
    for name in (*named, "training_script", "training_script_args", "config_file", "use_fsdp", "tpu"):
        assert ours[name] == theirs[name], name


LINES = """
--multi_gpu --num_processes 4 --mixed_precision fp16 --gpu_ids all
--num_processes=8 --num_machines=2 --machine_rank=1 --main_process_ip=10.0.0.1 --main_process_port=29500
--multi-gpu --num-processes 2 --mixed-precision no --same_network --enable_cpu_affinity
--use_fsdp --fsdp_sharding_strategy FULL_SHARD --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_version 2
--use_fsdp --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --fsdp_offload_params False --fsdp_min_num_params 9
--use_fsdp --fsdp_cpu_ram_efficient_loading true --fsdp_reshard_after_forward true --fsdp_use_orig_params true
--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --zero3_init_flag true --zero3_save_16bit_model false
--use_deepspeed --deepspeed_config_file ds.json --deepspeed_hostfile hosts --deepspeed_multinode_launcher pdsh
--cpu --num_cpu_threads_per_process 4 --gradient_accumulation_steps 2 --gradient_clipping 0.5
--dynamo_backend inductor --dynamo_mode default --dynamo_use_dynamic --dynamo_use_fullgraph
-m -q -t 3 --debug --log_dir logs --role trainer
--module --quiet --tee 0:1 --max_restarts 3 --monitor_interval 0.5
--no_python --rdzv_backend c10d --rdzv_conf timeout=900,is_host=1
--tpu --tpu_cluster --main_training_function main --downcast_bf16
--tpu --no_tpu_cluster
--use_parallelism_config --parallelism_config_tp_size 2 --parallelism_config_cp_comm_strategy allgather
--fp8_backend te --fp8_margin 1 --fp8_format HYBRID --fp8_amax_compute_algo max --fp8_opt_level O1
--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_num_micro_batches 2
--aws_access_key_id a --aws_secret_access_key b
""".strip().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_words_are_read_as_accelerates_parser_reads_them(line: str) -> None:
    theirs = vars(reference.launch_command_parser().parse_args([*line.split(), "train.py", "--lr", "1"]))
    ours = parse(*line.split())
    names = {"training_script_args", *theirs["nondefault"]}
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


@pytest.mark.parametrize(
    "words", [["--debug"], ["--debug", "underflow_overflow"], ["--", "b"], ["--num_processes=3", "-q"]]
)
def test_words_of_the_script_are_its_own(words: list[str]) -> None:
    found = launch_command_parser().parse_args(["--cpu", "train.py", *words])
    assert found.training_script_args == words and found.num_processes is None and not found.debug


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--num-machines", "2"], "num_machines", 2),
        (["--debug"], "debug", True),
        (["--debug", "false"], "debug", False),
        (["--debug", "yes"], "debug", True),
        (["--debug=True"], "debug", True),
        (["--debug=perhaps"], "debug", "perhaps"),
        (["--cpu"], "cpu", True),
        (["--fsdp_offload_params"], "fsdp_offload_params", "true"),
        (["--fsdp_state_dict_type", "FULL_STATE_DICT"], "fsdp_state_dict_type", "FULL_STATE_DICT"),
        (["--deepspeed_hostfile=hosts"], "deepspeed_hostfile", "hosts"),
        (["-q"], "quiet", True),
    ],
)
def test_words_are_read_as_the_command_reads_them(words: list[str], name: str, value: Any) -> None:
    found = parse(*words)
    assert found[name] == value
    assert (found["training_script"], found["training_script_args"]) == ("train.py", ["--lr", "1"])


def test_it_is_a_command_of_another_parser() -> None:
    parser = argparse.ArgumentParser()
    launch_command_parser(parser.add_subparsers())
    found = parser.parse_args(["launch", "--debug", "train.py", "--num_processes", "9"])
    assert (found.debug, found.num_processes, found.func) == (True, None, launch_command)
    assert found.training_script_args == ["--num_processes", "9"]


def test_it_runs_a_script_and_returns(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = launch_command_parser().parse_args(
        ["--cpu", "--num_processes", "1", "--mixed_precision", "bf16", script, "--lr", "1"]
    )
    launch_command(found)
    assert capfd.readouterr().out == "['--lr', '1'] None bf16\n"
    found.training_script_args = ["fail"]
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        launch_command(found)
    found.quiet = True
    with pytest.raises(SystemExit):
        launch_command(found)


def test_flags_become_the_options_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launch_parser, "run", lambda *given, **named: seen.append((given, named)) or 0)
    words = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params=true", "--debug", "-m", "pack", "x"]
    launch_command(launch_command_parser().parse_args(words))
    (what, values, config_file), named = seen[0]
    assert (what.kind, what.words, config_file) == ("module", ("pack", "x"), None)
    given = {name: value for name, value in values.items() if value not in (None, False)}
    fsdp = {"fsdp_config__fsdp_version": "2", "fsdp_config__fsdp_offload_params": "true"}
    assert given == {"use_fsdp": True, **fsdp, "debug": "true"}
    assert named == {"dry_run": False, "quiet": False, "in_place": False}


def test_wrong_options_are_all_named(script: str) -> None:
    found = launch_command_parser().parse_args(["--num_processes", "many", "--multi_gpu", "--tpu", script])
    with pytest.raises(ConfigError) as caught:
        launch_command(found)
    assert "many" in str(caught.value) and "--multi_gpu and --tpu" in str(caught.value)


def test_words_are_completed_by_the_config(tmp_path: Path, script: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3\ndebug: true\nmixed_precision: bf16\n"
    )
    args = launch_command_parser().parse_args(["--config_file", str(path), "--num_processes", "2", script])
    found, config, is_from_config = validate_launch_command(args)
    assert found is args and config is not None and config.num_processes == 3
    assert (args.num_processes, args.debug, args.multi_gpu, args.mixed_precision) == (2, True, False, "bf16")
    assert is_from_config
    assert validate_launch_command(args)[0] == args, "nothing changes any more"


def test_words_are_completed_without_a_config(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_parser, "default_config_file", "none.yaml")
    args = launch_command_parser().parse_args(["--cpu", script])
    assert validate_launch_command(args) == (args, None, False)
    assert (args.num_processes, args.num_machines, args.use_fsdp) == (1, 1, False)


def test_how_one_process_starts(script: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", "--mixed_precision", "bf16", script, "--lr", "1"])
    words, variables = prepare_simple_launcher_cmd_env(validate_launch_command(args)[0])
    assert words == [sys.executable, script, "--lr", "1"]
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16" and variables["PATH"]
    args.module = True
    assert prepare_simple_launcher_cmd_env(args)[0][1] == "-m"
    args.no_python = True
    with pytest.raises(click.UsageError, match="exclude each other"):
        prepare_simple_launcher_cmd_env(args)


def test_what_torchrun_is_told(script: str) -> None:
    words = [
        "--num_processes",
        "8",
        "--num_machines",
        "2",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "10.0.0.1",
    ]
    args = launch_command_parser().parse_args([*words, "--main_process_port", "29501", "--cpu", script])
    variables = prepare_multi_gpu_env(args)
    assert variables["ACCELERATE_USE_CPU"] == "true" and variables["PATH"]
    told = (args.nnodes, args.node_rank, args.nproc_per_node, args.master_addr, args.master_port)
    assert told == ("2", "1", "4", "10.0.0.1", "29501")


def test_port_0_becomes_a_free_one() -> None:
    args = argparse.Namespace(num_processes=1, main_process_port=0, mixed_precision="no")
    prepare_multi_gpu_env(args)
    assert args.master_port.isdigit() and args.master_port != "0"
    assert (args.master_addr, args.nproc_per_node, args.nnodes, args.node_rank) == (
        "127.0.0.1",
        "1",
        "1",
        "0",
    )


@pytest.mark.parametrize(
    "function",
    [launch_command, validate_launch_command, prepare_simple_launcher_cmd_env, prepare_multi_gpu_env],
)
def test_wrong_options_are_a_value_error(function: Any, script: str) -> None:
    args = launch_command_parser().parse_args(["--num_processes", "many", script])
    with pytest.raises(ValueError, match="many"):
        function(args)


def test_help_shows_one_spelling() -> None:
    shown = launch_command_parser().format_help()
    flags = [name.replace("_", "-") for name in parse() if "_" in name]
    found = [name for name in flags if f"--{name}" in shown]
    assert found == ["num-processes"], "it is the example of the other spelling"
