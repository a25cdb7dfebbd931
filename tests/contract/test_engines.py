"""What every engine keeps: output, values, errors, signals, interrupts, restarts, environment."""

from __future__ import annotations

import ast
import re
import time
from typing import Any

import psutil
import pytest

from tests.contract.conftest import Case
from tests.ports import free_port

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(300)]

REFUSED: dict[str, Any] = {
    "num_processes": 3,
    "num_nodes": 2,
    "max_restarts": 1,
    "block": False,
    "on_hang": "raise",
    "log_dir": "logs",
    "address": "somewhere",
    "tpu_mode": "spmd",
    "rdzv_conf": {"join_timeout": 60},
    "secret": "such as nobody would guess",
}


def pids_of(text: str) -> list[int]:
    return [int(word) for line in text.splitlines() if "pid" in line for word in line.split()[-1:]]


def wait_gone(pids: list[int], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, f"{pids} still run"
        time.sleep(0.05)


def test_lines_arrive_whole_and_in_order(case: Case) -> None:
    cell = case.launch(
        """
        def f():
            rank = os.environ.get("RANK", "0")
            for number in range(300):
                print(f"line {number} of {rank}", "é" * 50)
            os.write(1, b"from below\\n")
            os.system("echo from a child")
            print("to stderr", file=sys.stderr)
        """.replace("\n        ", "\n")
    ).ok()
    for rank in case.ranks:
        lines = [line for line in cell.stdout.splitlines() if line.endswith(f"of {rank} " + "é" * 50)]
        assert [line.split("line ")[1].split()[0] for line in lines] == [str(n) for n in range(300)]
    if case.engine.has_workers:  # in this process it is for the kernel to show these
        assert cell.stdout.count("from below") == cell.stdout.count("from a child") == len(case.ranks)
    assert cell.stderr.count("to stderr") == len(case.ranks)


def test_values_come_back(case: Case) -> None:
    f = """
def f():
    rank = int(os.environ.get("RANK", 0))
    return {"rank": rank, "tensor": torch.full((2,), rank)}
"""
    assert case.launch(f).ok().value == "{'rank': 0, 'tensor': tensor([0, 0])}"
    ranks = case.launch(f, returns="all", then="[each['rank'] for each in value]").ok().value
    assert ast.literal_eval(ranks) == list(case.ranks)
    assert case.launch(f, returns="none").ok().value == ""


def test_big_values_come_back(case: Case) -> None:
    f = "def f():\n    return torch.arange(12_500_000, dtype=torch.float32), b'x' * 3_000_000"
    assert case.launch(f, then="value[0].sum().item() > 7e13, len(value[1])").ok().value == "(True, 3000000)"


def test_ranks_are_one_run(case: Case) -> None:
    f = """
def f():
    state = PartialState()
    seen = torch.tensor([float(state.process_index)], device=state.device)
    from notebook_accel.utils import gather
    return state.num_processes, sorted(gather(seen).tolist())
"""
    expected = (len(case.ranks), [float(rank) for rank in case.ranks])
    values = case.launch(f, returns="all", then="[(count, ranks) for count, ranks in value]").ok().value
    assert ast.literal_eval(values) == [expected] * len(case.ranks)


def test_the_environment_is_the_workers(case: Case) -> None:
    f = "def f():\n    return os.environ['OF_THE_JOB'], os.environ['ACCELERATE_MIXED_PRECISION']"
    cell = case.launch(
        f,
        environment={"OF_THE_JOB": "yes"},
        mixed_precision="bf16",
        then="value, os.environ.get('OF_THE_JOB')",
    )
    assert ast.literal_eval(cell.ok().value) == (("yes", "bf16"), None)


def test_the_settings_of_the_notebook_are_the_workers(case: Case) -> None:
    f = """
import logging, warnings
torch.set_default_dtype(torch.float64); logging.getLogger("mine").setLevel(5); warnings.filterwarnings("ignore", "of a")
def f():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("of a cell")
    return torch.ones(1).dtype is torch.float64, logging.getLogger("mine").level, len(caught)
"""
    undo = "torch.set_default_dtype(torch.float32); del warnings.filters[0]; value"
    assert ast.literal_eval(case.launch(f, then=undo).ok().value) == (True, 5, 0)


def test_the_first_error_is_raised(case: Case) -> None:
    cell = case.launch(
        """
class Spilled(ValueError):
    pass

def f():
    if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        raise Spilled("the milk")
    time.sleep(3600)
"""
    )
    assert cell.error == ("Spilled", "the milk")
    assert 'raise Spilled("the milk")' in cell.traceback
    assert case.launch("def f():\n    return 'next'").ok().value == "'next'"


@pytest.mark.has_workers
def test_a_killed_worker_is_named(case: Case) -> None:
    cell = case.launch(
        """
def f():
    print("last words", flush=True)
    if int(os.environ["RANK"]) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)
"""
    )
    assert cell.error is not None and cell.error[0] == "WorkerKilledError"
    assert "rank 0" in cell.error[1] and "SIGKILL" in cell.error[1]
    assert "last words" in cell.stdout
    cell = case.launch("def f():\n    os._exit(7)")
    assert cell.error is not None and cell.error[0] == "WorkerExitedError" and "7" in cell.error[1]


def test_an_interrupt_ends_all(case: Case) -> None:
    cell = case.launch(
        """
def f():
    print("pid", os.getpid(), flush=True)
    time.sleep(0.5)
    if os.environ.get("RANK", "0") == "0":
        print("go", flush=True)
    time.sleep(3600)
""",
        output=[0],
        during=case.kernel.interrupt,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    pids = [pid for pid in pids_of(cell.stdout) if pid != case.kernel.pid]
    assert len(pids) == (1 if case.engine.has_workers else 0)
    wait_gone(pids)
    assert case.launch("def f():\n    return 'next'").ok().value == "'next'"


@pytest.mark.takes("max_restarts")
@pytest.mark.has_workers
def test_workers_start_again(case: Case) -> None:
    cell = case.launch(
        """
def f():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("attempt", attempt, flush=True)
    if attempt == 0 and os.environ["RANK"] == "0":
        raise OSError("once")
    return attempt
""",
        max_restarts=2,
    ).ok()
    assert cell.value == "1"
    assert "restart 1 of 2" in cell.stdout + cell.stderr
    assert case.launch("def f():\n    raise OSError('always')", max_restarts=1).error == ("OSError", "always")


@pytest.mark.takes("on_hang")
def test_a_hang_is_told_and_ends(case: Case) -> None:
    cell = case.launch(
        """
def f():
    print("pid", os.getpid(), flush=True)
    time.sleep(3600)  # asleep
""",
        hang_timeout=1.0,
        on_hang="raise",
    )
    assert cell.error is not None and cell.error[0] == "HangError"
    for rank in case.ranks:
        assert re.search(rf"rank {rank} \((on [^,]+, )?process ", cell.error[1])
    assert "time.sleep(3600)  # asleep" in cell.error[1]
    wait_gone(pids_of(cell.stdout))


@pytest.mark.takes("block")
def test_a_background_run_goes_on_and_stops(case: Case) -> None:
    more = {"start_method": "auto"} if case.tried.arguments.get("start_method") == "fork" else {}
    cell = case.launch(
        "def f():\n    time.sleep(60)",
        **more,
        block=False,
        then="import time\nwhile value.status != 'running': time.sleep(0.05)\nvalue.stop(0)\nvalue.status",
    )
    assert cell.ok().value == "'stopped'"
    done = case.launch("def f():\n    return 5", **more, block=False, then="value.result(), value.status")
    assert ast.literal_eval(done.ok().value) == (5, "done")


@pytest.mark.takes("num_nodes")
def test_no_node_of_several_runs_by_itself(case: Case) -> None:
    cell = case.launch(
        "def f():\n    print('ran')", num_nodes=2, use_port=free_port(), rdzv_conf={"join_timeout": 2}
    )
    assert cell.error is not None, (
        "the other node does not come; an engine that waits for none refuses num_nodes"
    )
    assert cell.error[0] in ("LaunchError", "ValueError")
    assert "ran" not in cell.stdout


def test_what_it_cannot_do_is_said(case: Case) -> None:
    assert case.engine.refuses.keys() <= REFUSED.keys(), "each has a value here to be tried with"
    for argument, why in case.engine.refuses.items():
        more = {"use_port": 29517, "node_rank": 1} if argument == "num_nodes" else {}
        cell = case.launch("def f():\n    print('ran')", **{argument: REFUSED[argument]}, **more)
        assert cell.error is not None and cell.error[0] == "ValueError"
        what = argument if argument == "secret" else f"{argument}={REFUSED[argument]!r}"
        assert f"{what} with engine={case.engine.name!r}: {why}" in cell.error[1]
        assert REFUSED["secret"] not in cell.error[1]
        assert "ran" not in cell.stdout
