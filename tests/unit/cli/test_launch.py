"""Tests for what `notebook-accel launch` makes of flags and files, and what it refuses; nothing is started."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from notebook_accel import devices, notebook_launcher, probes
from notebook_accel.cli import flags
from notebook_accel.cli.launch import launch
from notebook_accel.config.option import as_text
from notebook_accel.config.schema import LaunchConfig
from notebook_accel.launch.engines import base
from notebook_accel.launch.script import Script
from tests.unit import launching
from tests.unit.launching import TWO, dry, plan_of, refused, rows

NO_TPU = (
    "no TPU was found on this machine"
    if probes.is_available("torch_xla")
    else "XLA devices are used by torch_xla, which is not installed"
)

alone, gpus = launching.alone, launching.gpus


def accelerates() -> dict[str, Any]:
    return {text: action for action in launch_command_parser()._actions for text in action.option_strings}


def test_accelerates_flags_are_all_accepted_and_leave_the_script_alone() -> None:
    wrong = {}
    for text, action in accelerates().items():
        if action.dest == "help":
            continue
        value = [] if action.nargs == 0 else [str((action.choices or ["1"])[0])]
        try:
            with launch.make_context("launch", [text, *value, "train.py", text, "--", "--help"]) as ctx:
                if ctx.params["target"] != ("train.py", text, "--", "--help"):
                    wrong[text] = ctx.params["target"]
        except Exception as error:
            wrong[text] = error
    assert len(accelerates()) > 200
    assert not wrong


def test_each_flag_has_both_spellings() -> None:
    for parameter in launch.params:
        for flag in [text for text in parameter.opts if text.startswith("--")]:
            for spelling in {flag, f"--{flag[2:].replace('-', '_')}"}:
                value = "" if getattr(parameter, "is_flag", False) else "=1"
                with launch.make_context("launch", [spelling + value, "train.py"]) as ctx:
                    assert ctx.params[str(parameter.name)] in ("1", ("1",), True), spelling


def test_each_choice_can_be_given() -> None:
    for option in flags.options():
        for choice in option.choices or ():
            config: Any = flags.apply(LaunchConfig(), {option.name.replace(".", "__"): as_text(choice)})
            for name in option.path:
                config = getattr(config, name)
            assert config == choice, option.name


@pytest.mark.parametrize(
    ("words", "debug", "target"),
    [
        (["--debug", "train.py", "false"], "true", ("train.py", "false")),
        (["--debug", "false", "train.py"], "false", ("train.py",)),
        (["--debug=no", "train.py"], "no", ("train.py",)),
        (["--debug", "--", "train.py", "--"], "true", ("train.py", "--")),
        (["-q", "--debug", "--cpu", "true", "-m", "json.tool", "-m"], "true", ("json.tool", "-m")),
    ],
)
def test_switches_take_truth_words_only(words: list[str], debug: str, target: tuple[str, ...]) -> None:
    with launch.make_context("launch", words) as ctx:
        assert ctx.params["debug"] == debug
        assert ctx.params["target"] == target


def test_a_flag_counts_more_than_the_file_and_the_file_more_than_the_default() -> None:
    Path("c.yaml").write_text("mixed_precision: bf16\nnum_processes: 2\nuse_cpu: true\ndebug: false\n")
    found = rows(dry("--config_file", "c.yaml", "--num-processes=4").output)
    assert found["num_processes"] == ("4", "flag")
    assert found["mixed_precision"] == ("bf16", "c.yaml")
    assert found["max_restarts"] == ("0", "default")
    assert found["distributed_type"] == ("MULTI_CPU", "this machine")
    assert found["ACCELERATE_MIXED_PRECISION"] == ("bf16", "c.yaml")
    assert found["ACCELERATE_USE_CPU"] == ("true", "c.yaml")
    assert found["ACCELERATE_DEBUG_MODE"] == ("false", "c.yaml")
    assert found["WORLD_SIZE"] == ("4", "torch elastic")


def test_the_default_file_is_used_where_there_is_one(tmp_path: Path) -> None:
    assert rows(dry().output)["mixed_precision"] == ("no", "default")
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    default = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    default.write_text("mixed_precision: fp16\n")
    assert rows(dry().output)["mixed_precision"] == ("fp16", str(default))
    Path("c.yaml").write_text("debug: true\n")
    assert rows(dry("--config-file", "c.yaml").output)["mixed_precision"] == ("no", "default")


def test_what_is_chosen_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert "ACCELERATE_MIXED_PRECISION" not in plan_of().environment
    assert plan_of("--mixed_precision", "no").environment["ACCELERATE_MIXED_PRECISION"] == "no"
    Path("c.yaml").write_text("mixed_precision: 'no'\n")
    assert plan_of(config_file="c.yaml").environment["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize(
    ("flag", "kind", "variable"),
    [
        ("--multi_gpu", "MULTI_GPU", None),
        ("--use_fsdp", "FSDP", "ACCELERATE_USE_FSDP"),
        ("--use-deepspeed", "DEEPSPEED", "ACCELERATE_USE_DEEPSPEED"),
        ("--use_megatron_lm", "MEGATRON_LM", "ACCELERATE_USE_MEGATRON_LM"),
        ("--use_parallelism_config", "MULTI_GPU", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    ],
)
def test_flags_that_choose_how_to_train(gpus: None, flag: str, kind: str, variable: str | None) -> None:
    plan = plan_of(flag)
    assert plan.config.distributed_type == kind
    assert plan.config.num_processes == 2
    assert plan.doubts == ()
    assert variable is None or plan.environment[variable] == "true"


@pytest.mark.parametrize("flag", ["--use_fsdp", "--use_deepspeed", "--use_megatron_lm"])
def test_a_library_that_shards_finds_ranks_for_one_process_too(gpus: None, flag: str) -> None:
    result = dry(flag, "--num_processes=1")
    assert "--nproc-per-node=1" in result.output
    assert rows(result.output)["WORLD_SIZE"] == ("1", "torch elastic")
    assert "torchrun" not in dry("--num_processes=1").output


def test_the_cpu_is_used_where_it_is_asked_for_and_where_there_is_nothing_else(gpus: None) -> None:
    plan = plan_of(*TWO)
    assert (plan.config.distributed_type, plan.config.use_cpu) == ("MULTI_CPU", True)
    assert plan.environment["ACCELERATE_USE_CPU"] == "true"
    assert plan_of("--cpu").config.num_processes == 1
    assert "ACCELERATE_USE_CPU" not in plan_of().environment
    Path("c.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nuse_cpu: false\n")
    plan = plan_of("--cpu", config_file="c.yaml")
    assert (plan.config.distributed_type, plan.config.num_processes, plan.doubts) == ("MULTI_CPU", 8, ())


def test_no_gpu_means_cpu() -> None:
    assert plan_of().environment["ACCELERATE_USE_CPU"] == "true"


def test_each_process_has_its_share_of_the_cores_unless_someone_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accel.devices.share_of_cores", lambda number: 64 // number)
    assert plan_of(*TWO).derived["OMP_NUM_THREADS"] == "32"
    assert plan_of("--cpu").derived == {}
    flagged = plan_of(*TWO, "--num_cpu_threads_per_process", "5")
    assert flagged.environment["OMP_NUM_THREADS"] == "5" and "OMP_NUM_THREADS" not in flagged.derived
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in plan_of(*TWO).derived


def test_accumulation_is_one_flag_for_all_libraries(gpus: None) -> None:
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    assert plan_of("--gradient_accumulation_steps", "4").environment[name] == "4"
    assert plan_of("--use_deepspeed", "--gradient_accumulation_steps", "4").environment[name] == "4"
    assert plan_of("--use_deepspeed", "--gradient_accumulation_steps", "auto").environment[name] == "auto"


def test_a_flag_without_effect_is_remarked() -> None:
    sentence = "Warning: --fsdp_offload_params has no effect: distributed_type is NO\n"
    assert sentence in dry("--fsdp_offload_params", "true", "--gradient_accumulation_steps=2").output
    used = dry("--cpu", "--use_fsdp", "--num_processes=2", "--fsdp_offload_params", "true")
    assert "no effect" not in used.output and used.exit_code == 0


BOTH = "hosts: [gpu1:2, gpu2:2]\nslurm: [partition=gpu]\nnum_processes: 4\n"


@pytest.mark.parametrize(
    ("words", "used", "idle"),
    [
        (["--engine=slurm"], "slurm", "hosts"),
        (["--engine=ssh"], "hosts", "slurm"),
        ([], "hosts", "slurm"),
        (["--slurm=time=30"], "slurm", "hosts"),
    ],
)
def test_what_a_config_has_for_another_engine_is_left_out(words: list[str], used: str, idle: str) -> None:
    Path("c.yaml").write_text(BOTH)
    plan = plan_of(*words, config_file="c.yaml")
    assert getattr(plan.config, used) and not getattr(plan.config, idle)
    assert plan.config.engine == {"hosts": "ssh", "slurm": "slurm"}[used]
    said = dry("--config_file=c.yaml", *words)
    assert f"Warning: {idle} of c.yaml has no effect: it is for engine=" in said.output
    assert idle not in rows(said.stdout)


def test_what_a_config_says_of_nodes_is_left_out_where_hosts_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("c.yaml").write_text(
        "num_machines: 4\nmin_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nnum_processes: 4\n"
    )
    words = ["--config_file=c.yaml", "--engine=ssh", "--hosts=gpu1:2,gpu2:2"]
    said = dry(*words)
    for name in ("num_machines", "machine_rank", "main_process_ip"):
        assert f"Warning: {name} of c.yaml has no effect: hosts says which machines" in said.output
    plan = plan_of(*words[1:], config_file="c.yaml")
    assert (plan.config.num_processes, plan.config.num_machines, plan.config.min_machines) == (4, 1, None)
    text = "\n".join(refused(capsys, *words, "--num_machines=4", "--machine_rank=0", "train.py"))
    assert "num_machines=" in text and "hosts= says which machines" in text


def test_what_a_flag_has_for_another_engine_stays(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = refused(capsys, "--engine=local", "--hosts=gpu1", "--cpu", "--num_processes=2", "train.py")
    assert "hosts=['gpu1'] with engine='local': it is for engine='ssh'" in text


def test_the_old_name_of_an_engine_is_read_as_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("engine: elastic\n")
    config = LaunchConfig.read("c.yaml")
    assert config.engine == plan_of("--cpu", config_file="c.yaml").config.engine == "local"
    config.write("c.yaml")
    assert "engine: local\n" in Path("c.yaml").read_text()
    assert plan_of("--cpu", "--engine=elastic").config.engine == "local"
    (text,) = refused(capsys, "--engine=elastic", "--mixed_precision=fp32", "train.py")
    assert text == "mixed_precision 'fp32' is none of no, fp16, bf16, fp8"
    with pytest.raises(ValueError, match=r"hosts=\['gpu1'\] with engine='local'"):
        notebook_launcher(print, hosts=["gpu1"], engine="elastic")
    config = LaunchConfig(hosts=("gpu1",))
    with pytest.warns(UserWarning, match="this launch has engine='local'"), pytest.raises(ValueError):
        notebook_launcher(print, num_processes=0, engine="elastic", config=config)


def test_hosts_may_be_a_list() -> None:
    assert plan_of("--hosts=gpu1, gpu2:4", "--hosts", "gpu3").config.hosts == ("gpu1", "gpu2:4", "gpu3")
    Path("c.yaml").write_text("hosts: gpu1,gpu2\n")
    assert plan_of(config_file="c.yaml").config.hosts == ("gpu1", "gpu2")


def test_a_host_that_is_taken_for_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = refused(capsys, "--hosts", "node1", "node2", "train.py")
    assert text.startswith("node2 does not exist in ")
    assert text.endswith("; where it is a host too, write --hosts node1,node2")


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num_processes=two", "--mixed_precision", "bf17", "--multi_gpu", "--use_fsdp", "trian.py")
    assert refused(capsys, *words) == [
        "--multi_gpu and --use_fsdp exclude each other: give one of them",
        "num_processes 'two' is no whole number",
        "mixed_precision 'bf17' is none of no, fp16, bf16, fp8",
        "trian.py does not exist, did you mean train.py?",
    ]
    unknown = f"engine='lokal': choose among {', '.join(map(repr, ['auto', *base.names()]))}"
    words = ("--num_processes=-1", "--engine=lokal", "--mixed_precision=fp32", "train.py")
    assert refused(capsys, *words) == [
        f"{unknown}; did you mean 'local'?",
        "num_processes -1 is less than 1",
        "mixed_precision 'fp32' is none of no, fp16, bf16, fp8",
    ]
    words = ("--engine=lokal", "--num_machines=2", "--tpu_cluster", "trian.py")
    assert refused(capsys, *words) == [
        "tpu_use_cluster: TPU pods are not supported",
        f"{unknown}; did you mean 'local'?",
        "num_machines 2 needs main_process_ip: the address of the node of rank 0",
        "trian.py does not exist, did you mean train.py?",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cpu", "--multi_gpu"], "--cpu and --multi_gpu exclude each other"),
        (["--tpu_cluster"], "TPU pods are not supported"),
        (["--aws_access_key_id", "x"], "--aws_access_key_id: SageMaker is not supported"),
        (["--mpirun_hostfile", "x"], "mpirun is not used"),
        (["--num_machines", "2"], "needs main_process_ip"),
        (["--tpu"], f"distributed_type XLA: {NO_TPU}"),
        (["--cpu", "--num_machines", "3:2", "--main_process_ip=a"], "min_machines 3 > num_machines 2"),
        (["--cpu", "--num_machines", "1:x", "--main_process_ip=a"], "num_machines 'x' is no whole number"),
        (["--multi_gpu"], "MULTI_GPU: this machine has no CUDA GPU: launch where there is one, or add --cpu"),
        (["--use_fsdp"], "FSDP: this machine has no GPU: launch where there is one, or add --cpu"),
        (
            ["--cpu", "--num_processes=2", "--use_parallelism_config", "--parallelism_config_tp_size=3"],
            "tp 3 != world 2",
        ),
        (["--config_file", "no.yaml"], "no.yaml cannot be read"),
    ],
)
def test_what_cannot_run(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = refused(capsys, *words, "train.py")
    assert sentence in text


def test_a_pipe_is_for_a_single_process(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    (text,) = refused(capsys, "--cpu", "--num_processes=2", "pipe")
    assert text == "pipe is no file: a single process can read it, not several"
    assert "does not exist" not in dry("--cpu", "--num_processes=1", "pipe").output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nosuch.py"], "nosuch.py does not exist in "),
        (["folder"], "folder is a folder"),
        (["-m", "no_such_module.part"], "there is no module no_such_module.part"),
        (["-m", "train.py"], "train.py is a file, no module: leave -m out"),
        (["--no_python", "no-such-program"], "there is no program no-such-program"),
        (["broken.ipynb"], "broken.ipynb is no notebook"),
    ],
)
def test_what_is_not_there(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    Path("broken.ipynb").write_text("{")
    (text,) = refused(capsys, *words)
    assert sentence in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num_processes", "4"], "num_processes 4: this machine has 2 CUDA GPUs: give --num_processes 2"),
        (["--gpu_ids", "0,5"], "gpu_ids 0,5: this machine has 2 CUDA GPUs, counted from 0"),
        (
            ["--gpu_ids", "1", "--num_processes", "2"],
            "num_processes 2: gpu_ids 1 are 1: give --num_processes 1",
        ),
    ],
)
def test_more_than_this_machine_has_is_a_warning_until_it_is_run(
    gpus: None, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = dry(*words)
    assert result.exit_code == 0 and f"Warning: {sentence}" in result.output
    (text,) = refused(capsys, *words, "train.py")
    assert text.startswith(sentence)


def test_chosen_devices_are_the_visible_ones(gpus: None) -> None:
    plan = plan_of("--gpu_ids", "1")
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert plan.config.num_processes == 1 and plan.doubts == ()


def test_chosen_devices_of_other_makers_are_counted_by_their_own_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    npu = dataclasses.replace(devices.kind_of("npu"), counter=lambda: 1)
    monkeypatch.setattr(devices, "best", lambda *_, **__: npu)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    (doubt,) = plan_of("--gpu_ids", "5").doubts
    assert "this machine has 1 Ascend NPU, counted from 0" in str(doubt)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    assert plan_of("--gpu_ids", "5").doubts == ()


def test_a_device_that_was_asked_for_and_is_not_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dataclasses.replace(devices.CUDA, counter=lambda: 0)
    monkeypatch.setattr(devices, "KINDS", (absent, devices.CPU))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:3")
    (doubt,) = plan_of("--num_processes", "1").doubts
    assert "ACCELERATE_TORCH_DEVICE='cuda:3': this machine has no CUDA GPU" in str(doubt)
    assert plan_of("--cpu").doubts == ()


def test_a_variable_without_a_legal_value_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "maybe")
    (told,) = refused(capsys, "--dry-run", "train.py")
    assert told.startswith("environment variable ACCELERATE_USE_CPU: 'maybe' is neither true")


def test_a_script_asks_for_what_a_cell_would_ask_for() -> None:
    words = ("--num_machines=2", "--machine_rank=1", "--main_process_ip=host", "--num_processes=6", "--cpu")
    more = (
        "--hang_timeout=0",
        "--output=0,3",
        "--rdzv_conf=join_timeout=1.5,last_call_timeout=2,is_host=false",
    )
    script = Script(kind="script", words=("train.py", "--lr", "3"))
    request = plan_of(*words, *more, "--max_restarts=3", "--role=ps").make_request(script)
    found = dict(request.options)
    environment = found.pop("environment")
    assert found == {
        "num_processes": 3,
        "num_nodes": 2,
        "node_rank": 1,
        "master_addr": "host",
        "use_port": 29500,
        "rdzv_conf": {"join_timeout": 1.5, "last_call_timeout": 2, "is_host": "false"},
        "max_restarts": 3,
        "hang_timeout": None,
        "output": [0, 3],
        "mixed_precision": "no",
        "returns": "none",
    }
    assert environment["ACCELERATE_USE_CPU"] == "true" and environment["ROLE_NAME"] == "ps"
    assert (request.function, request.args, request.quiet) == (script, (), True)


@pytest.mark.parametrize(
    ("words", "is_distributed"),
    [
        (("--cpu",), False),
        (("--cpu", "--engine=inprocess"), False),
        (("--cpu", "--engine=local"), True),
        (("--cpu", "--on_hang=raise"), True),
        (("--cpu", "--log_dir=logs"), True),
        (("--tpu",), True),
        (TWO, True),
    ],
)
def test_a_single_process_that_nobody_watches_needs_no_launch(
    words: tuple[str, ...], is_distributed: bool
) -> None:
    assert plan_of(*words).is_distributed == is_distributed


def test_a_tpu_counts_its_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accel.devices.probes.is_available", lambda name: True)
    monkeypatch.setattr("notebook_accel.tpu.is_here", lambda environment=None: True)
    monkeypatch.setattr("notebook_accel.tpu.num_processes", lambda environment=None: 4)
    plan = plan_of("--tpu")
    assert (plan.config.num_processes, plan.config.engine, plan.doubts) == (4, "xla", ())
    assert plan_of("--tpu", "--tpu_mode=spmd").config.num_processes == 1


def test_a_number_may_have_an_exponent() -> None:
    assert plan_of("--cpu", "--num_processes", "1e1").config.num_processes == 10


def test_a_taken_port_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (text,) = refused(capsys, *TWO, "--main_process_port", str(port), "train.py")
    assert text.startswith(f"main_process_port {port} cannot be used (Address already in use)")


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: z.json\nnum_processes: 2\n",
        "distributed_type: MULTI_NPU\nnum_processes: 8\n",
        "distributed_type: XLA\ntpu_name: t\n",
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\nmain_process_ip: a\nmain_process_port: 1\n",
        "mixed_precision: fp8\nfp8_config:\n  backend: TE\n  fp8_format: E4M3\n",
        "use_xpu: true\n",
    ],
)
def test_a_dry_run_works_on_any_machine(text: str) -> None:
    Path("c.yaml").write_text(text)
    result = dry("--config_file", "c.yaml")
    assert result.exit_code == 0, result.output
    assert "Warning: " in result.output or "fp8" in text
    assert "\nran\n" not in result.output


def test_the_command_of_a_dry_run_is_torchruns() -> None:
    words = ("--num_machines=2", "--machine_rank=1", "--main_process_ip=host", "--num_processes=4", "--cpu")
    assert dry(*words).output.splitlines()[1].split() == [
        "torchrun", "--nnodes=2", "--node-rank=1", "--rdzv-backend=static", "--rdzv-endpoint=host:29500",
        "--nproc-per-node=2", "train.py",
    ]  # fmt: skip
    assert rows(dry(*words).output)["RANK"] == ("2..3", "torch elastic")
    words = ("--num_machines=1:2", "--main_process_ip=host", "--num_processes=4", "--cpu")
    assert dry(*words).output.splitlines()[1].split()[1] == "--nnodes=1:2"
    assert rows(dry(*words).output)["WORLD_SIZE"] == ("2..4", "torch elastic")
    assert dry("--cpu").output.splitlines()[1].split() == [sys.executable, "train.py"]


def test_a_dry_run_shows_the_job_that_would_be_submitted() -> None:
    words = (
        "--engine=slurm",
        "--num_machines=2",
        "--num_processes=8",
        "--slurm=partition=gpu",
        "--slurm=exclusive",
    )
    lines = [line.strip() for line in dry(*words).output.splitlines()]
    shown = lines[lines.index("Job") + 1 :]
    assert shown[:2] == [
        "8 processes on 2 nodes by SLURM, 4 on each",
        "sbatch --nodes=2 --ntasks-per-node=4 --partition=gpu --exclusive",
    ]
    assert "a process for each GPU" in dry("--engine=slurm").output


def test_a_dry_run_shows_hosts_and_ranks() -> None:
    lines = [line.strip() for line in dry("--hosts=gpu1:4,gpu2").output.splitlines()]
    at = lines.index("Hosts")
    assert [line.split(maxsplit=1) for line in lines[at + 1 : at + 3]] == [
        ["gpu1", "ranks 0..3"],
        ["gpu2", "a rank for each GPU, or one"],
    ]
    lines = [line.strip() for line in dry("--hosts=gpu1:4,gpu2:1").output.splitlines()]
    assert lines[lines.index("Hosts") + 2].split(maxsplit=1) == ["gpu2", "rank 4"]
