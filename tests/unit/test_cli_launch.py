"""Tests for `notebook-accel launch`: flags, files, checks, and real launches of two CPU processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import nbformat
import psutil
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from click.testing import CliRunner, Result

from notebook_accel.cli import flags, notebook
from notebook_accel.cli.launch import launch
from notebook_accel.cli.main import cli, main
from notebook_accel.cli.plan import Plan, resolved
from notebook_accel.config.option import as_text
from notebook_accel.config.schema import LaunchConfig

ROOT = Path(__file__).resolve().parents[2]
TWO = ("--cpu", "--num_processes", "2")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder with a script, no GPU, no default config, and an environment that says nothing."""
    for name in [
        n for n in os.environ if n.startswith("ACCELERATE_") or n in ("OMP_NUM_THREADS", "LOGLEVEL")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')\n")
    yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


def dry(*words: str) -> Result:
    return CliRunner().invoke(
        cli, ["launch", "--dry-run", *words, *([] if "x.ipynb" in words else ["train.py"])]
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the sentences that a launch ends with before anything starts."""
    with pytest.raises(SystemExit) as stop:
        main(["launch", *words])
    assert stop.value.code == 2
    found = capsys.readouterr()
    assert found.out == ""
    return found.err.replace("Error: ", "").splitlines()


def plan_of(*words: str, config_file: str | None = None) -> Plan:
    with launch.make_context("launch", [*words, "train.py"]) as ctx:
        return resolved(ctx.params, config_file)[0]


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Return value and source of each name that a dry run prints."""
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith("  ")]
    return {words[0]: (words[1], words[2]) for words in lines if len(words) == 3}


@dataclasses.dataclass
class Launched:
    """A launch in a copy of this process, which spares it torch's import; that of a notebook in a fresh one.

    Jupyter's libraries keep the event loop that they were first used with, whose descriptor a copy has not.
    """

    words: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        reading, writing = os.pipe()
        self.errors = Path(tempfile.mkdtemp(dir=".")) / "stderr"
        if any(word.endswith(".ipynb") for word in self.words):
            self.pid = self._start(writing)
        else:
            self.pid = os.fork()
        if self.pid == 0:
            self._launch(writing)
        os.close(writing)
        self.out = os.fdopen(reading, encoding="utf-8")

    def _start(self, writing: int) -> int:
        command = [sys.executable, "-m", "notebook_accel", "launch", *self.words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=writing,
                stderr=errors,
                env=environment,
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.SIG_DFL
                ),  # shells' background jobs ignore it
            )
        return self.process.pid

    def _launch(self, writing: int) -> NoReturn:
        code = 99
        try:
            os.dup2(writing, 1)
            os.dup2(os.open(self.errors, os.O_CREAT | os.O_WRONLY), 2)
            os.closerange(3, 1000)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ.update(self.environment)
            main(["launch", *self.words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> tuple[int, str, str]:
        """Return exit code, output and errors."""
        with self.out:
            text = self.out.read()
        if hasattr(self, "process"):
            code = self.process.wait()
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, text, self.errors.read_text()


def run(*words: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """Return output and errors of a launch that ends with a code."""
    found, out, errors = Launched(words, environment).wait()
    assert found == code, (found, out, errors)
    return out, errors


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
        long = {text for text in parameter.opts if text.startswith("--")}
        assert {text.replace("_", "-") for text in long} <= long | {"--p"}, parameter.name


def test_each_choice_can_be_given() -> None:
    for option in flags.options():
        for choice in option.choices or ():
            config: Any = flags.chosen(LaunchConfig(), {option.name.replace(".", "__"): as_text(choice)})
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
    assert "--nproc-per-node=1" in result.output.splitlines()[1]
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


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num_processes=two", "--mixed_precision", "bf17", "--multi_gpu", "--use_fsdp", "trian.py")
    assert refused(capsys, *words) == [
        "--multi_gpu and --use_fsdp exclude each other: give one of them",
        "num_processes 'two' is no whole number",
        "mixed_precision 'bf17' is none of no, fp16, bf16, fp8",
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
        (["--cpu", "--tee", "9"], "tee '9' is none of 0, 1, 2, 3"),
        (["--tpu"], "launches on TPUs are not supported"),
        (["--multi_gpu"], "MULTI_GPU: this machine has no CUDA GPU: launch where there is one, or add --cpu"),
        (["--use_fsdp"], "FSDP: this machine has no GPU: launch where there is one, or add --cpu"),
        (["--config_file", "no.yaml"], "no.yaml cannot be read"),
    ],
)
def test_what_cannot_run(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = refused(capsys, *words, "train.py")
    assert sentence in text


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
    assert dry("--cpu").output.splitlines()[1].split() == [sys.executable, "train.py"]


SCRIPT = """
import json, torch
from {package} import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1, device=accelerator.device)).item()
found = [accelerator.num_processes, total, accelerator.mixed_precision, accelerator.gradient_accumulation_steps]
if accelerator.is_main_process:
    print(json.dumps([*found, accelerator.device.type, torch.get_num_threads()]))
accelerator.end_training()
"""


@pytest.mark.parametrize("package", ["accelerate", "notebook_accel"])
def test_scripts_of_accelerate_and_ours_run(package: str) -> None:
    Path("s.py").write_text(SCRIPT.format(package=package))
    words = (
        "--mixed_precision",
        "bf16",
        "--gradient_accumulation_steps",
        "4",
        "--num_cpu_threads_per_process=1",
    )
    command = [sys.executable, "-m", "notebook_accel", "launch", *TWO, *words, "s.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == [2, 2.0, "bf16", 4, "cpu", 1]


def test_two_nodes_meet() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    Path("s.py").write_text(f"import os\nprint(*[os.environ[name] for name in {names}])\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = (*TWO, "--num_machines=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}")
    nodes = [Launched((*words, f"--machine_rank={rank}", "s.py")) for rank in (1, 0)]
    # not the errors: torch's static rendezvous may warn where node 0, which holds the store, is the first to end
    assert [node.wait()[:2] for node in nodes] == [
        (0, f"1 0 2 1 127.0.0.1 {port}\n"),
        (0, f"0 0 2 0 127.0.0.1 {port}\n"),
    ]


def test_a_node_that_does_not_come_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--num_machines=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}")
    for backend in ("static", "c10d"):
        more = (f"--rdzv_backend={backend}", "--rdzv_conf=timeout=1,join_timeout=1,last_call_timeout=1")
        out, errors = run(*TWO, *words, *more, "train.py", code=1)
        assert out == ""
        assert errors.startswith("notebook-accel: the nodes did not meet: ") and errors.count("\n") == 1


ARGUMENTS = ("--help", "--", "--cpu", "$$x", "${local_rank}", "", "a b")


@pytest.mark.parametrize("words", [("--cpu",), TWO])
def test_arguments_and_exit_code_are_the_scripts_own(words: tuple[str, ...]) -> None:
    Path("s.py").write_text(
        "import os, sys, json\n"
        "class Mine: pass\n"
        "import __main__\n"
        "assert __main__.Mine is Mine and __file__ == os.path.abspath('s.py') == __main__.__file__\n"
        "assert sys.path[0] == os.path.dirname(os.path.realpath('s.py')), sys.path\n"
        "if os.environ.get('RANK', '0') == '0': print(json.dumps(sys.argv), flush=True); sys.exit(7)\n"
        "import time; time.sleep(60)\n"
    )
    out, errors = run(*words, "s.py", *ARGUMENTS, code=7)
    assert json.loads(out) == ["s.py", *ARGUMENTS]
    assert errors.count("\n") == (words == TWO)


def test_modules_and_programs_run() -> None:
    Path("package").mkdir()
    Path("package/part.py").write_text(
        "import sys, os\nprint(__package__, sys.argv[1:], os.environ['RANK'])\n"
    )
    out, _ = run(*TWO, "-m", "package.part", "--x")
    assert sorted(out.splitlines()) == ["package ['--x'] 0", "package ['--x'] 1"]
    assert run(*TWO, "--no_python", "echo", "hi") == ("hi\nhi\n", "")


FAILING = """
import os, sys, time
def work():
    raise ValueError(f"bad batch on rank {os.environ['RANK']}")
if os.environ["RANK"] == "0" and sys.argv[1] == "one":
    time.sleep(60)
if os.environ["RANK"] == "0":
    while not os.listdir(os.environ["FOLDER"]): time.sleep(0.01)
    time.sleep(0.02)
else:
    open(os.path.join(os.environ["FOLDER"], "about"), "w")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
work()
"""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_failing_rank_shows_its_traceback_once(quiet: bool, tmp_path: Path) -> None:
    Path("s.py").write_text(FAILING)
    (tmp_path / "f").mkdir()
    _, errors = run(
        *TWO, *["-q"] * quiet, "s.py", "all" if quiet else "one", code=1, FOLDER=str(tmp_path / "f")
    )
    lines = errors.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{tmp_path / "s.py"}", line ')
    assert errors.count("Traceback") == 1
    assert "ValueError: bad batch on rank 1" in lines
    if quiet:
        assert lines[-1].startswith("ValueError: bad batch on rank")
    else:
        assert lines[-1].startswith("notebook-accel: rank 1 (local rank 1, process ")
        assert lines[-1].endswith(") failed first, with exit code 1")


def test_each_restart_shows_its_own_failure() -> None:
    Path("s.py").write_text(
        "import os, sys\n"
        "rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if rank == '1': raise ValueError(f'attempt {attempt}')\n"
        "import time; time.sleep(60)\n"
    )
    _, errors = run(*TWO, "--max_restarts=1", "s.py", code=1)
    assert [line for line in errors.splitlines() if line.startswith("ValueError")] == [
        "ValueError: attempt 0",
        "ValueError: attempt 1",
    ]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    Path("s.py").write_text(FAILING)
    (tmp_path / "f").mkdir()
    _, errors = run(*TWO, "s.py", "killed", code=137, FOLDER=str(tmp_path / "f"))
    assert " was ended by SIGKILL: most often the operating system's out-of-memory killer" in errors


SLEEPING = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(signum: signal.Signals) -> None:
    Path("s.py").write_text(SLEEPING)
    command = [sys.executable, "-m", "notebook_accel", "launch", *TWO, "s.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.send_signal(signum)
        _, text = launcher.communicate(timeout=20)
    assert not psutil.wait_procs(ranks, timeout=5)[1]
    assert launcher.returncode == 128 + signum
    assert text.splitlines()[-1] == f"notebook-accel: ended by {signum.name}, with all processes"
    assert text.count("Traceback") == (signum == signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent was killed")
@pytest.mark.may_leak("temp_files", reason="a killed launcher cannot remove its folder")
def test_no_process_outlives_a_killed_launcher() -> None:
    Path("s.py").write_text(SLEEPING)
    launched = Launched((*TWO, "s.py"))
    ranks = [psutil.Process(int(launched.out.readline())) for _ in range(2)]
    os.kill(launched.pid, signal.SIGKILL)
    assert launched.wait()[0] == -signal.SIGKILL
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def write_book(*sources: str, parameters: str | None = None) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if parameters is not None:
        cells.insert(0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), "x.ipynb")
    return Path("x.ipynb")


def test_a_notebook_runs_with_parameters_and_is_written_although_a_cell_fails() -> None:
    first = "import os\nprint(rate, name, os.environ['ACCELERATE_MIXED_PRECISION'])\n3 + 4"
    write_book(first, "1 / 0", parameters="rate = 1\nname = 'a'")
    words = ("-p", "rate=1e-3", "-p", "name=no way", "--output=out/y.ipynb")
    out, errors = run("--mixed_precision=bf16", "x.ipynb", *words, code=1)
    assert out == "0.001 no way bf16\n7\n"
    assert errors.count("ZeroDivisionError: division by zero") == 1
    assert errors.endswith("a cell of x.ipynb failed\nnotebook-accel: wrote out/y.ipynb\n")
    book = nbformat.read("out/y.ipynb", as_version=4)
    assert book.cells[1].source == "# Parameters\nrate = 0.001\nname = 'no way'"
    assert book.cells[1].metadata.tags == ["injected-parameters"]
    assert book.cells[3].outputs[0].ename == "ZeroDivisionError"
    assert nbformat.read("x.ipynb", as_version=4).cells[1].outputs == []


def test_an_interrupt_reaches_the_cell() -> None:
    write_book("import time\nprint('up', flush=True)\ntime.sleep(60)", "print('never')")
    launched = Launched(("x.ipynb",))
    assert launched.out.readline() == "up\n"
    children = psutil.Process(launched.pid).children(recursive=True)
    os.kill(launched.pid, signal.SIGINT)
    code, out, errors = launched.wait()
    assert (code, out) == (130, "")
    assert "notebook-accel: ended by SIGINT\n" in errors
    assert not psutil.wait_procs(children, timeout=5)[1]
    book = nbformat.read("x.executed.ipynb", as_version=4)
    assert [output.get("ename") for output in book.cells[0].outputs] == [None, "KeyboardInterrupt"]


def test_a_dry_run_of_a_notebook() -> None:
    write_book("1")
    result = dry("x.ipynb", "-p", "a=1")
    assert result.output.splitlines()[1] == "  papermill x.ipynb x.executed.ipynb -p a 1"
    assert not Path("x.executed.ipynb").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1e-3", 0.001), ("-2.5", -2.5), ("true", True), ("null", None), ("", ""), ("bf16", "bf16"),
        ("no", "no"), ("'1'", "1"), ("[1, 2]", "[1, 2]"), ("a: b", "a: b"), ("2024-01-01", "2024-01-01"), ("{", "{"),
    ],
)  # fmt: skip
def test_parameters_are_yaml_scalars(text: str, value: Any) -> None:
    found = notebook.scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_where_parameters_go() -> None:
    book = nbformat.read(write_book("last", parameters="rate: float = 1\nname = 2"), as_version=4)
    assert notebook.inject(book, {"rate": float("inf")}) == []
    assert notebook.inject(book, {"rates": 2}) == [
        "the parameters cell does not set rates, did you mean rate?"
    ]
    assert [cell.source for cell in book.cells][1:] == ["# Parameters\nrates = 2", "last"]
    bare = nbformat.read(write_book("last"), as_version=4)
    assert "no cell is tagged" in notebook.inject(bare, {"rate": float("inf")})[0]
    assert bare.cells[0].source == "# Parameters\nrate = float('inf')"
    nbformat.validate(bare)


@pytest.mark.parametrize("text", ["rate", "1a=2", "for=1"])
def test_a_wrong_parameter_is_refused(text: str) -> None:
    write_book("1")
    result = CliRunner().invoke(cli, ["launch", "x.ipynb", "-p", text])
    assert result.exit_code == 2 and "is not NAME=VALUE with a Python name" in " ".join(result.output.split())
