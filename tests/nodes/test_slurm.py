"""Launches by SLURM on two nodes: the queue, allocations, what is told before anything is submitted, who ends what."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.nodes.ends import CUT_SECONDS, assert_gone, assert_in_time, read_pids
from tests.nodes.slurm_cluster import KEEPS, SlurmCluster, make_cluster, why_no_cluster
from tests.notebooks.kernel import Cell, Kernel, prepare_kernel, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in KEEPS.items()],
]

PATIENCE = 180
SETUP = """
import os, subprocess, sys, time
import torch
from notebook_accel import Accelerator, PartialState, notebook_launcher, runs
from notebook_accel.utils import gather
%load_ext notebook_accel

def launch(function, *args, num_nodes=2, **more):
    more.setdefault("num_processes", num_nodes)
    return notebook_launcher(function, args, engine="slurm", num_nodes=num_nodes, **more)

def wait(notes="/dev/null"):
    child = subprocess.Popen(["sleep", "1000"])
    with open(notes, "a") as file:
        print(os.getpid(), child.pid, file=file)
    PartialState().wait_for_everyone()
    if os.environ["RANK"] == "0":
        print("go", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def kernel(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = cluster.start_kernel(tmp_path_factory.mktemp("slurm"))
    with prepare_kernel(kernel, SETUP, timeout=PATIENCE):
        yield kernel


def test_eight_ranks_on_two_nodes_and_the_same_job_again(kernel: Kernel, idle: SlurmCluster) -> None:
    cell = kernel.run(
        """
        def seen():
            state = PartialState()
            ranks = gather(torch.tensor([state.process_index])).tolist()
            names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
            place = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"], os.getppid()
            return ranks, [int(os.environ[name]) for name in names], place

        from unittest import mock
        from notebook_accel.launch.engines.remote import hosts_group, pool
        with (mock.patch.object(hosts_group, "_CLEAR_SECONDS", 60.0),
              mock.patch.object(pool, "_PROOF_SECONDS", 60.0)):  # a busy machine answers late
            first = launch(seen, num_processes=8, returns="all")
            second = launch(seen, num_processes=8, returns="all")
        [each[2] for each in first] == [each[2] for each in second], [each[:2] for each in first], [
            each[2][0] for each in first], list(runs()[-1].record.nodes.values())
        """,
        timeout=PATIENCE,
    ).ok()
    same, seen, nodes, named = ast.literal_eval(cell.value)
    places = [[rank, 4, node, 2, 8] for node in range(2) for rank in range(4)]
    assert seen == [(list(range(8)), place) for place in places]
    assert same and nodes == named == ["n1"] * 4 + ["n2"] * 4
    assert "Launching seen on 8 processes on 2 nodes by SLURM; its nodes stay 120 s" in cell.stdout
    assert re.search(r"Job \d+: RUNNING on n1, n2, after \d+ s in the queue", cell.stderr)


def test_a_job_that_waits_says_why_and_an_interrupt_cancels_it(kernel: Kernel, idle: SlurmCluster) -> None:
    idle.run("sbatch", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000")
    (other,) = idle.jobs()
    cell = kernel.run(
        """
        run = launch(wait, block=False, view="none")
        while run.status != "queued" or "Resources" not in run.record.notice:
            time.sleep(0.05)
        notice = run.record.notice
        run.stop(0)
        notice, run.status
        """,
        timeout=PATIENCE,
    ).ok()
    notice, status = ast.literal_eval(cell.value)
    assert re.match(r"Job \d+: PENDING \(Resources\), in the queue since .*, estimated start ", notice)
    assert status == "stopped"
    assert wait_until(lambda: idle.jobs() == [other], PATIENCE)

    def interrupt() -> None:
        assert wait_until(lambda: len(idle.jobs()) == 2, PATIENCE)
        kernel.interrupt()

    cell = kernel.run("print('go', flush=True) or launch(wait)", timeout=PATIENCE, during=interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert re.fullmatch(r"wait: job \d+ was cancelled, it had not begun", cell.error[1])
    assert wait_until(lambda: idle.jobs() == [other], PATIENCE)


def test_an_interrupt_of_what_runs_cancels_the_job(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    notes = tmp_path / "pids"
    cell = kernel.run(f"launch(wait, {str(notes)!r})  # go", timeout=PATIENCE, during=kernel.interrupt)
    since = time.monotonic()
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert len(read_pids(notes)) == 4
    assert_gone(read_pids(notes), since)
    assert wait_until(lambda: not idle.jobs(), PATIENCE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("slurm={'partition': 'nowhere'}", "SLURM refuses it: .*invalid partition specified: nowhere"),
        ("slurm={'gpus_per_node': 4}", "SLURM refuses it: .*Invalid generic resource"),
        ("slurm={'bogus': 4}", "SLURM refuses it: .*unrecognized option '--bogus"),
        ("slurm={'time': 'soon'}", "SLURM refuses it: .*Invalid --time specification"),
        ("slurm={'nodes': 4}", "slurm has 'nodes': num_nodes= says it"),
        ("slurm=['partition=x']", "a dict of sbatch's options is needed"),
        ("num_nodes=7", "SLURM refuses it: .*node configuration is not available"),
        ("num_processes=3", "num_processes=3 with num_nodes=2: every node has as many ranks"),
        ("num_nodes='1:2', num_processes=2", "num_nodes='1:2': this engine needs a number, not a range"),
        ("node_rank=1", "node_rank=1 with engine='slurm': it starts the ranks of all nodes"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_submitted(
    arguments: str, text: str, kernel: Kernel, idle: SlurmCluster
) -> None:
    cell = kernel.run(f"launch(wait, {arguments})", timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] in ("ValueError", "TypeError"), cell.error
    assert re.search(text, cell.error[1]), cell.error[1]
    assert not idle.jobs()


def test_a_job_waits_for_nodes_that_are_drained(kernel: Kernel, idle: SlurmCluster) -> None:
    def serve_again() -> None:
        idle.run("scontrol", "update", "NodeName=n1,n2", "State=RESUME", may_fail=True)  # they serve already

    idle.run("scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=maintenance")
    try:
        cell = kernel.run("launch(os.getpid)", timeout=PATIENCE, during=serve_again, at="PENDING")
    finally:
        serve_again()  # also where the cell tells of no wait
    assert cell.ok().value.isdecimal() and "PENDING" in cell.stdout + cell.stderr


def test_nodes_that_are_kept_make_room_for_another_launch(kernel: Kernel, idle: SlurmCluster) -> None:
    kernel.run("launch(os.getpid, num_processes=2, slurm_keep=1000)", timeout=PATIENCE).ok()
    (kept,) = idle.jobs()
    size = {"num_processes": 4, "slurm": {"exclusive": True}}
    kernel.run(f"launch(os.getpid, **{size!r}, slurm_keep=0)", timeout=PATIENCE).ok()
    assert kept not in idle.jobs()


def test_a_python_that_is_missing_is_named_and_nothing_is_submitted_again(
    kernel: Kernel, idle: SlurmCluster
) -> None:
    before = idle.run("scontrol", "show", "jobs", "--oneliner").count("JobId=")
    cell = kernel.run("launch(os.getpid, python='/no/such/python')", timeout=PATIENCE)
    assert cell.error is not None and "there is no /no/such/python: name the right one" in cell.error[1], (
        cell.error
    )
    assert idle.run("scontrol", "show", "jobs", "--oneliner").count("JobId=") <= before + 1
    assert wait_until(lambda: not idle.jobs(), PATIENCE)


def lose(kernel: Kernel, cluster: SlurmCluster, folder: Path, *words: str) -> tuple[Cell, list[int], float]:
    """Launch ranks that wait, run a command of SLURM, and return the cell, what ran, and when it was done."""
    moments: list[float] = []

    def during() -> None:
        cluster.run(*(word.format(job=cluster.jobs()[0]) for word in words))
        moments.append(time.monotonic())

    notes = folder / "pids"  # what is said on a connection that ends may be lost
    cell = kernel.run(f"launch(wait, {str(notes)!r})  # go", timeout=PATIENCE, during=during)
    assert len(read_pids(notes)) == 4, cell.stdout
    return cell, read_pids(notes), moments[0]


def test_a_cancelled_job_ends_everything(kernel: Kernel, idle: SlurmCluster, tmp_path: Path) -> None:
    cell, pids, since = lose(kernel, idle, tmp_path, "scancel", "{job}")
    assert cell.error is not None and cell.error[0] == "WorkerError"
    assert re.search(
        r"is lost: node n\d: .*; job \d+ was cancelled from outside while its ranks ran", cell.error[1]
    ), cell.error
    assert_gone(pids, since)


def test_a_cancelled_job_is_not_started_again(kernel: Kernel, idle: SlurmCluster) -> None:
    cell = kernel.run(
        "launch(wait, max_restarts=1)",
        timeout=PATIENCE,
        during=lambda: print(idle.run("scancel", *idle.jobs())),
    )
    assert cell.error is not None and cell.error[0] == "WorkerError"
    assert re.search(r"job \d+ was cancelled from outside while its ranks ran", cell.error[1]), cell.error
    told = cell.stdout + cell.stderr
    assert "; restart 1 of 1" not in told and re.search(r"no restart 1 of 1: job \d+ was cancelled", told), (
        told
    )


def test_where_slurm_signals_groups_of_processes_nothing_is_left(tmp_path: Path) -> None:
    if reason := why_no_cluster():
        pytest.skip(reason)
    with make_cluster(tmp_path, tracking="pgid") as cluster:
        kernel = cluster.start_kernel(tmp_path)
        try:
            kernel.run(SETUP, timeout=PATIENCE).ok()
            cell, pids, since = lose(kernel, cluster, tmp_path, "scancel", "{job}")
        finally:
            kernel.close()
    assert cell.error is not None and "is lost: node n" in cell.error[1]
    # no process hears of it; what leads to the agents ends KillWait and two seconds later, and they note the silence
    assert_gone(pids, since + 5 + 2, CUT_SECONDS)


def test_a_killed_step_ends_what_it_led_to(kernel: Kernel, idle: SlurmCluster, tmp_path: Path) -> None:
    moments: list[float] = []

    def kill() -> None:
        children = psutil.Process(kernel.pid).children()
        clients = [child for child in children if child.name() == "srun" and child.status() != "zombie"]
        next(client for client in clients if "--nodelist=n2" in client.cmdline()).kill()
        moments.append(time.monotonic())

    notes = tmp_path / "pids"
    cell = kernel.run(f"launch(wait, {str(notes)!r})  # go", timeout=PATIENCE, during=kill)
    assert_in_time(moments[0])
    assert cell.error is not None and "is lost: node n2: its srun step has ended" in cell.error[1]
    assert len(read_pids(notes)) == 4
    assert_gone(read_pids(notes), moments[0])


def test_a_queued_again_job_goes_on(kernel: Kernel, idle: SlurmCluster, tmp_path: Path) -> None:
    """As after a preemption: SLURM ends the job's processes, and queues the job again."""
    cell = kernel.run(
        f"""
        marker = {str(tmp_path / "step")!r}

        def train():
            start = int(open(marker).read()) if os.path.exists(marker) else 0
            PartialState().wait_for_everyone()
            if os.environ["RANK"] == "0":
                with open(marker, "w") as file:
                    print(start + 5, file=file)
                print("go", flush=True)
            if start == 0:
                time.sleep(1000)
            return start, os.environ["TORCHELASTIC_RESTART_COUNT"]

        launch(train, max_restarts=1)
        """,
        timeout=PATIENCE,
        during=lambda: idle.requeue(),
    ).ok()
    assert cell.value == "(5, '1')" and "restart 1 of 1" in cell.stdout + cell.stderr


def test_the_function_is_warned_of_the_time_limit(kernel: Kernel, idle: SlurmCluster) -> None:
    cell = kernel.run(
        """
        def steps():
            accelerator, step = Accelerator(), 0
            while not accelerator.should_stop:  # which comes after half a minute, many thousand steps
                accelerator.gather(torch.ones(1))
                step += 1
            return step

        values = launch(steps, slurm={"time": "00:01:00"}, returns="all")
        values if values[0] != values[1] else True
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "True"
    told = re.search(
        r"job \d+ ends in (\d+) s by its time limit: accelerator.should_stop is true now", cell.stderr
    )
    assert told is not None and int(told[1]) <= 30, "of a job of a minute, half is for work"
    again = "os.environ['SLURM_JOB_ID']"
    cell = kernel.run(
        f"launch(lambda: ({again}, Accelerator().should_stop), slurm={{'time': '00:01:00'}})"
    ).ok()
    job, has_to_stop = ast.literal_eval(cell.value)
    assert f"job {job} ends" not in told[0] and not has_to_stop, "the cell is run again: in a job with time"


def test_an_allocation_is_used_and_nothing_is_submitted(idle: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom notebook_accel import PartialState, notebook_launcher\n"
        "def f():\n    return os.environ['SLURM_JOB_ID'], os.environ['SLURMD_NODENAME'], PartialState().num_processes\n"
        "if __name__ == '__main__':\n    print(notebook_launcher(f, engine='slurm', num_nodes=2, num_processes=4, "
        "returns='all'))\n    notebook_launcher(f, engine='slurm', num_nodes=3)\n"
    )
    words = ["salloc", "-N2", "--ntasks-per-node=2", sys.executable, str(script)]
    done = subprocess.run(
        words,
        env={**os.environ, **idle.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    job = re.search(r"Granted job allocation (\d+)", done.stderr)
    assert job is not None, done.stderr
    assert str([(job[1], node, 4) for node in ("n1", "n1", "n2", "n2")]) in done.stdout, (
        done.stdout + done.stderr
    )
    assert f"in the allocation of job {job[1]}." in done.stdout
    assert f"num_nodes=3: the allocation of job {job[1]} has 2 nodes" in done.stderr


def test_a_killed_kernel_ends_everything(idle: SlurmCluster, tmp_path: Path) -> None:
    other = idle.start_kernel(tmp_path)

    def kill() -> None:
        other.kill()
        raise InterruptedError

    try:
        other.run(SETUP, timeout=PATIENCE).ok()
        marker = tmp_path / "pids"
        other.run(
            f"""
            def note():
                child = subprocess.Popen(["sleep", "1000"])
                with open({str(marker)!r}, "a") as file:
                    print(os.getpid(), os.getppid(), child.pid, file=file)
                PartialState().wait_for_everyone()
                print("go", flush=True)
                time.sleep(1000)
            """
        ).ok()
        with pytest.raises(InterruptedError):
            other.run("launch(note)", timeout=PATIENCE, during=kill)
        began = time.monotonic()
        pids = read_pids(marker)
        assert len(pids) == 6
        assert_gone(pids, began)
        assert wait_until(lambda: not idle.jobs(), PATIENCE)
    finally:
        other.close()


def test_nodes_that_nobody_uses_are_let_go(kernel: Kernel, idle: SlurmCluster) -> None:
    kernel.run("launch(os.getpid, slurm_keep=600)", timeout=PATIENCE).ok()
    (job,) = idle.jobs()
    # the last launch says how long
    cell = kernel.run("launch(os.getenv, 'SLURM_JOB_ID', slurm_keep=2)", timeout=PATIENCE).ok()
    assert cell.value == repr(job)
    assert wait_until(lambda: not idle.jobs(), PATIENCE)
    kernel.run("launch(os.getpid, slurm_keep=0)", timeout=PATIENCE).ok()
    assert wait_until(lambda: not idle.jobs(), PATIENCE)


@pytest.mark.parametrize("detach", [False, True])
def test_nodes_are_not_kept_from_a_launch_that_waits(
    kernel: Kernel, idle: SlurmCluster, detach: bool
) -> None:
    code = f"""
        first = launch(time.sleep, 4, slurm={{"exclusive": True}}, slurm_keep=600, block=False, view="none")
        while first.status != "running":
            time.sleep(0.1)
        second = launch(os.getenv, "SLURM_JOB_ID", detach={detach}, block=False, view="none")
        first.result(), int(second.result())
        """
    cell = kernel.run(code, timeout=PATIENCE).ok()
    assert cell.value.startswith("(None, ")


def test_a_session_on_two_nodes(kernel: Kernel, idle: SlurmCluster) -> None:
    cell = kernel.run(
        """
        from notebook_accel import Session
        session = Session(engine="slurm", num_nodes=2, num_processes=2)
        found = session.run(lambda: os.environ["SLURMD_NODENAME"], returns="all")
        session.close()
        found
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "['n1', 'n2']"
    assert "The session's nodes stay 120 s after its end for the next launch." in cell.stderr


def test_a_session_by_the_magic(kernel: Kernel, idle: SlurmCluster) -> None:
    kernel.run("%load_ext notebook_accel\n%session 2 --slurm time=5 --num-nodes 2 --slurm-keep 0").ok()
    cell = kernel.run('%%distributed\nimport os\nprint(os.environ["SLURMD_NODENAME"])', timeout=PATIENCE).ok()
    assert sorted(cell.lines) == ["[0] n1", "[1] n2"]
    kernel.run("%session close").ok()
    assert wait_until(lambda: not idle.jobs(), PATIENCE)


def test_a_script_by_the_command_and_its_config(idle: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom notebook_accel import PartialState\nstate = PartialState()\n"
        "print('rank', state.process_index, 'of', state.num_processes, 'on', os.environ['SLURMD_NODENAME'])\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text("num_machines: 2\nnum_processes: 4\nslurm:\n  time: 5\n  comment: a test\n")
    command = [sys.executable, "-m", "notebook_accel", "launch", "--config_file", str(config)]
    done = subprocess.run(
        [*command, "--slurm_keep", "0", str(script)],
        env={**os.environ, **idle.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4 on n{1 + rank // 2}" in done.stdout, done.stdout + done.stderr
    assert wait_until(lambda: not idle.jobs(), PATIENCE)
    done = subprocess.run(
        [*command, "--slurm", "partition=nowhere", str(script)],
        env={**os.environ, **idle.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode != 0 and "invalid partition specified: nowhere" in done.stdout + done.stderr
    assert not idle.jobs()


def test_the_run_goes_on_after_a_node_that_fails(kernel: Kernel, idle: SlurmCluster, tmp_path: Path) -> None:
    def fail() -> None:
        idle.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
        idle.start_again()
        idle.run("scontrol", "update", "NodeName=n2", "State=RESUME", may_fail=True)  # it is back by itself

    cell = kernel.run(
        f"""
        marker = {str(tmp_path / "started")!r}

        def train():
            PartialState().wait_for_everyone()
            if not os.path.exists(marker):
                PartialState().wait_for_everyone()
                open(marker, "w").close()
                print("go", flush=True)
                time.sleep(1000)
            return gather(torch.tensor([PartialState().process_index])).tolist()

        launch(train, max_restarts=1)
        """,
        timeout=PATIENCE,
        during=fail,
    ).ok()
    assert cell.value == "[0, 1]" and "restart 1 of 1" in cell.stdout + cell.stderr


def test_two_notebooks_at_once(kernel: Kernel, idle: SlurmCluster, tmp_path: Path) -> None:
    other = idle.start_kernel(tmp_path)
    try:
        other.run(SETUP, timeout=PATIENCE).ok()
        code = """
        def places():
            state = PartialState()
            return gather(torch.tensor([state.process_index])).tolist(), os.environ["SLURM_JOB_ID"]

        run = launch(places, block=False, view="none")
        """
        for each in (kernel, other):
            each.run(code, timeout=PATIENCE).ok()
        found = [
            ast.literal_eval(each.run("run.result()", timeout=PATIENCE).ok().value)
            for each in (kernel, other)
        ]
    finally:
        other.close()
    assert [ranks for ranks, _ in found] == [[0, 1]] * 2
    assert found[0][1] != found[1][1], "each has a job of its own"
