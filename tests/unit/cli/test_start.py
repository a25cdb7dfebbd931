"""Tests for `notebook-accel launch` with real processes: two CPU ranks, nodes that meet, failures and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from notebook_accel.cli import start
from notebook_accel.config.option import as_text
from notebook_accel.config.schema import LaunchConfig
from notebook_accel.events import RaisedError
from notebook_accel.launch.supervise.local_group import SCRIPT_GRACE_SECONDS
from tests import forker
from tests.ports import reserve_port
from tests.unit import launching
from tests.unit.clock import wait_until
from tests.unit.launching import TWO, Launched, drop_gloo, run

alone = launching.alone

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
    done = forker.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(drop_gloo(done.stdout)) == [2, 2.0, "bf16", 4, "cpu", 1]


def test_a_single_process_runs_with_closed_output() -> None:
    """As daemons and jobs of cron are started."""
    Path("s.py").write_text("open('ran', 'w').write('yes')\nraise SystemExit(3)")
    command = f"exec {sys.executable} -m notebook_accel launch --cpu --num_processes 1 s.py >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=240, check=False).returncode == 3
    assert Path("ran").read_text() == "yes"


def _without_waits(errors: str) -> str:
    """Return the errors of a node without what it says of a wait for others, which a busy machine makes long."""
    return re.sub(r"notebook-accel: (.* waits for .*|all \d nodes are there.*)\n", "", errors)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_meet_and_part_without_a_word(backend: str) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    Path("s.py").write_text(f"import os\nprint(*[os.environ[name] for name in {names}])\n")
    with reserve_port() as port:
        words = (*TWO, "--num_machines=2", "--same_network", f"--rdzv_backend={backend}")
        where = ("--main_process_ip=127.0.0.1", f"--main_process_port={port}")
        nodes = [Launched((*words, *where, f"--machine_rank={rank}", "s.py")) for rank in (1, 0)]
        found = [node.wait() for node in nodes]
    assert [(code, _without_waits(errors)) for code, _, errors in found] == [(0, ""), (0, "")]
    assert sorted(out for _, out, _ in found) == ["0 0 2 1 0\n", "1 0 2 1 1\n"]
    if backend == "static":
        assert found[0][1] == "1 0 2 1 1\n", "ranks are those that were given"


def test_node_0_holds_the_store_also_where_it_comes_late_and_ends_first() -> None:
    Path("s.py").write_text(
        "import os, time\n"
        "from notebook_accel import Accelerator\n"
        "import torch\n"
        "accelerator = Accelerator()\n"
        "total = accelerator.reduce(torch.ones(1)).item()\n"
        "time.sleep(int(os.environ['RANK']))\n"
        "print(accelerator.num_processes, total)\n"
        "accelerator.end_training()\n"
    )
    for backend in ("static", "c10d"):
        with reserve_port() as port:
            words = (*TWO, "--num_machines=2", f"--rdzv_backend={backend}")
            where = ("--main_process_ip=127.0.0.1", f"--main_process_port={port}")
            late = Launched((*words, *where, "--machine_rank=1", "s.py"))
            time.sleep(0.5)
            first = Launched((*words, *where, "--machine_rank=0", "s.py"))
            for code, out, errors in (late.wait(), first.wait()):
                assert (code, out, _without_waits(errors)) == (0, "2 2.0\n", "")


def test_a_node_that_does_not_come_is_one_sentence() -> None:
    for backend in ("static", "c10d"):
        more = (f"--rdzv_backend={backend}", "--rdzv_conf=timeout=1,join_timeout=1,last_call_timeout=1")
        with reserve_port() as port:
            words = ("--num_machines=2", "--main_process_ip=127.0.0.1", f"--main_process_port={port}")
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
    if quiet:
        assert lines[-1] in [f"ValueError: bad batch on rank {rank}" for rank in range(2)], (
            "either may be first"
        )
    else:
        assert "ValueError: bad batch on rank 1" in lines
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
    assert " was ended by SIGKILL: " in errors and "out-of-memory killer" in errors


def test_a_rank_is_named_that_is_killed_while_its_peers_gather_over_sockets() -> None:
    """They get errors of their connections, which follow from its end."""
    Path("s.py").write_text(
        "import os, torch\n"
        "from notebook_accel import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "for number in range(40):\n"
        "    accelerator.gather(torch.tensor([number]))\n"
        "if accelerator.process_index == 1:\n"
        "    os.kill(os.getpid(), 9)\n"
        "accelerator.gather(torch.tensor([1]))\n"
    )
    _, errors = run(*TWO, "s.py", code=137)
    assert "rank 1" in errors and " was ended by SIGKILL: " in errors


SLEEPING = "import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(signum: signal.Signals) -> None:
    Path("s.py").write_text(SLEEPING)
    command = [sys.executable, "-m", "notebook_accel", "launch", *TWO, "s.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        launcher.send_signal(signum)
        _, text = launcher.communicate(timeout=240)
    assert not psutil.wait_procs(ranks, timeout=240)[1]
    assert launcher.returncode == 128 + signum
    assert text.splitlines()[-1] == f"notebook-accel: ended by {signum.name}, with all processes"
    assert text.count("Traceback") == (signum == signal.SIGINT)


def test_a_launcher_starts_an_agent_for_the_ranks_and_no_other_process() -> None:
    Path("s.py").write_text(SLEEPING)
    launched = Launched((*TWO, "s.py"))
    ranks = {int(launched.out.readline()) for _ in range(2)}
    (agent,) = psutil.Process(launched.pid).children()
    started = {child.pid for child in agent.children()}
    os.kill(launched.pid, signal.SIGTERM)
    launched.wait()
    assert started == ranks


DETACHING = """
import os, pathlib, subprocess
silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
detached = subprocess.Popen(["sleep", "300"], start_new_session=True, **silent)
pathlib.Path(f"detached{os.environ['RANK']}").write_text(str(detached.pid))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent was killed")
@pytest.mark.parametrize("how", ["killed", "interrupted twice"])
def test_no_process_outlives_its_launcher(how: str) -> None:
    stubborn = (
        "import signal\nfor one in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(one, signal.SIG_IGN)\n"
    )
    Path("s.py").write_text(stubborn + DETACHING + SLEEPING)
    launched = Launched((*TWO, "s.py"))
    ranks = [psutil.Process(int(launched.out.readline())) for _ in range(2)]
    left = [psutil.Process(int(Path(f"detached{rank}").read_text())) for rank in range(2)]
    before = time.monotonic()
    if how == "killed":
        os.kill(launched.pid, signal.SIGKILL)
    else:
        os.kill(launched.pid, signal.SIGINT)
        wait_until(lambda: "a second Ctrl-C kills them" in launched.errors.read_text())
        os.kill(launched.pid, signal.SIGINT)
    _, _, errors = launched.wait()
    assert time.monotonic() - before < SCRIPT_GRACE_SECONDS, "it did not wait for those that ignore it"
    assert ("a second Ctrl-C kills them" in errors) == (how != "killed")
    assert not psutil.wait_procs(ranks, timeout=240)[1]
    try:
        # whoever detaches a program wants it to live on; it may just have begun, and a zombie is running for psutil
        for process in left:
            wait_until(lambda process=process: process.status() == psutil.STATUS_SLEEPING)
    finally:
        for process in left:
            process.kill()


ARRIVED = """
import json, os, torch
from notebook_accel import Accelerator
accelerator = Accelerator()
dynamo = accelerator.state.dynamo_plugin
found = [accelerator.num_processes, accelerator.mixed_precision, accelerator.gradient_accumulation_steps]
found += [torch.get_num_threads(), accelerator.state.debug, accelerator.device.type]
found += [dynamo.backend.value, dynamo.mode, dynamo.dynamic]
names = ("MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "ROLE_NAME", "MORE")
if accelerator.is_main_process:
    print(json.dumps([*found, *(os.environ[name] for name in names)]))
accelerator.end_training()
"""


@pytest.fixture
def port() -> Iterator[int]:
    with reserve_port() as port:
        yield port


@pytest.mark.parametrize("face", ["flags", "file"])
def test_many_options_arrive_in_processes(face: str, port: int) -> None:
    Path("s.py").write_text(ARRIVED)
    options: dict[str, object] = {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
    }
    options |= {"num_cpu_threads_per_process": 1, "main_process_port": port, "debug": True, "max_restarts": 2}
    options |= {"role": "trainer", "monitor_interval": 0.05, "log_dir": "logs", "tee": "3"}
    compiling = {"dynamo_backend": "EAGER", "dynamo_mode": "reduce-overhead", "dynamo_use_dynamic": True}
    config = LaunchConfig.model_validate(
        {**options, "use_cpu": True, "dynamo_config": compiling, "environment": {"MORE": "a=b c"}}
    )
    words = ["--config_file", str(config.write("c.yaml"))]
    if face == "flags":  # all but those that have none
        LaunchConfig.model_validate({"environment": {"MORE": "a=b c"}}).write("c.yaml")
        words += [
            "--cpu",
            *(f"--{name}={as_text(value)}" for name, value in {**options, **compiling}.items()),
        ]
    out, errors = run(*words, "s.py")
    wanted = [
        2,
        "bf16",
        3,
        1,
        True,
        "cpu",
        "EAGER",
        "reduce-overhead",
        True,
        str(port),
        "2",
        "trainer",
        "a=b c",
    ]
    assert json.loads(out) == wanted, errors
    (log,) = Path("logs").rglob("rank_0.log")
    head, _, written = log.read_text().partition("\n")
    assert head.startswith("--- s.py, ") and json.loads(drop_gloo(written)) == wanted


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "ValueError"),
        ("no\nmore", "ValueError: no"),
        ("many words " * 10_000, f"ValueError: {'many words ' * 17}many [...]"),
    ],
)
def test_the_summary_has_a_line_for_each_failure(message: str, line: str) -> None:
    error = RaisedError(type_name="ValueError", message=message, pickled=None, frames=())
    assert start._first_line(error) == line


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, which takes no folder")
def test_a_log_folder_that_cannot_be_made_is_one_sentence() -> None:
    Path("s.py").write_text("print('ran')")
    out, errors = run(*TWO, "--log_dir", "/proc/nothing", "s.py", code=1)
    assert "log_dir='/proc/nothing' cannot be made (No such file or directory)" in errors
    assert "Traceback" not in errors and out == ""
