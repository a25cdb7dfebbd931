"""Command lines of srun, and what SLURM says of a job."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.remote.client import Wanted
from notebook_accel.launch.engines.slurm import command, submission
from notebook_accel.launch.engines.slurm.command import SrunClient, parse_job, tells_of_preemption

WANTED = Wanted(python="3.11", torch="2.13.0", package="0.1", with_ipython=False, takes_over=False)
LINE = (
    "JobId=3 JobName=a job JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 Restarts=2 TimeLimit=01:00:00 "
    "SubmitTime=2026-11-23T21:37:00 StartTime=2026-11-23T22:34:48 EndTime=2026-11-23T23:34:48 NodeList=(null)"
)

INTERRUPTED = """
import os, signal, threading
from notebook_accel.launch.engines.slurm import command, submission

signal.signal(signal.SIGINT, lambda *_: None)
is_over = threading.Event()

def interrupt():
    while not is_over.wait(0.0005):
        os.killpg(0, signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    for _ in range(100):
        command.ask(["true"], lambda: None)
finally:
    is_over.set()
"""


def test_a_step_takes_nothing_from_the_job_that_the_notebook_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_CONF", "/c")
    monkeypatch.setenv("NOTEBOOK_ACCEL_SECRET", "s" * 32)
    client = SrunClient(job_id="3")
    words = client.make_command("n1", None, "abc", WANTED)
    assert words[:3] == ["srun", "--jobid=3", "--nodelist=n1"] and "--overlap" in words
    environment = client.make_environment()
    assert environment is not None and environment["SLURM_CONF"] == "/c"
    assert not {"SLURM_NTASKS_PER_NODE", "NOTEBOOK_ACCEL_SECRET"} & environment.keys()
    assert client == SrunClient(job_id="3", seconds=5.0), "connections are shared however long they stay"


def test_what_a_job_says() -> None:
    state = parse_job("3", LINE)
    assert state.describe() == "PENDING (Resources)" and state.restarts == 2 and not state.node_list
    assert state.start == time.mktime((2026, 11, 23, 22, 34, 48, 0, 0, -1))
    assert not state.is_running and not state.is_over
    line = "JobState={} Reason=None StartTime=Unknown TimeLimit=UNLIMITED EndTime=2027-01-01T00:00:00"
    over, running = parse_job("3", line.format("NODE_FAIL")), parse_job("3", line.format("RUNNING"))
    assert over.describe() == "NODE_FAIL" and over.is_over and over.start is None
    assert over.end == time.mktime((2027, 1, 1, 0, 0, 0, 0, 0, -1))
    assert running.end is None, "nothing limits it"
    assert parse_job("3", "").state == "UNKNOWN"


def test_the_name_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Configuration data as of now\nClusterName             = red\nCommunicationParameters = (null)\n"
    monkeypatch.setattr(command, "ask", lambda *_, **__: text)
    assert command.find_cluster() == "red"

    def fail(*_: object, **__: object) -> str:
        raise LaunchError("unable to contact slurmctld")

    monkeypatch.setattr(command, "ask", fail)
    assert command.find_cluster() == ""


@pytest.mark.parametrize(
    ("state", "reason", "told"),
    [
        ("CANCELLED", "Resources", "CANCELLED"),
        ("FAILED", "Priority", "FAILED"),
        ("TIMEOUT", "TimeLimit", "TIMEOUT (TimeLimit)"),
        ("FAILED", "RaisedSignal:53(Real-time_signal_19)", "FAILED (RaisedSignal:53(Real-time_signal_19))"),
        ("PENDING", "Priority", "PENDING (Priority)"),
    ],
)
def test_why_a_job_once_waited_is_no_reason_of_its_end(state: str, reason: str, told: str) -> None:
    assert parse_job("3", f"JobState={state} Reason={reason}").describe() == told


def test_why_a_step_failed() -> None:
    client = SrunClient(job_id="3")
    said = [
        "srun: cluster configuration lacks support for cpu binding",
        "srun: error: no step",
        "srun: x",
    ]
    assert client.explain_failure("n1", 1, said) == "node n1: srun ended with code 1 (srun: error: no step)"
    assert client.find_telling_line(said[:1]) == ""
    assert "still waits for its step of job 3" in client.explain_failure("n1", None, [])


def test_what_commands_write_may_be_any_bytes() -> None:
    assert command.ask(["printf", r"\377"], lambda: None) == "\N{REPLACEMENT CHARACTER}"


def test_commands_are_asked() -> None:
    assert command.ask(["cat"], lambda: None, "text") == "text"
    with pytest.raises(command.LaunchError, match="wrong"):
        command.ask(["sh", "-c", "echo wrong >&2; exit 3"], lambda: None)


def test_an_interrupt_of_the_process_group_ends_no_command() -> None:
    """Front ends send it to the whole group, of which a process that starts still is."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "is_preempted", "told"),
    [
        ("JobState=RUNNING PreemptTime=2026-11-28T08:08:32", False, "got its nodes"),
        ("JobState=PREEMPTED PreemptTime=2026-11-28T08:08:32", False, "got its nodes"),
        (
            "JobState=PENDING Reason=BeginTime",
            True,
            "got its nodes, and is queued again: PENDING (BeginTime)",
        ),
    ],
)
def test_a_preempted_job_is_told_as_that(line: str, is_preempted: bool, told: str) -> None:
    state = parse_job("3", line)
    assert state.describe_loss(is_preempted=is_preempted) == f"job 3 was preempted: another job {told}"
    assert state.is_being_preempted == line.startswith("JobState=RUNNING")


def test_a_job_that_was_not_preempted_is_not_told_as_that() -> None:
    state = parse_job("3", "JobState=RUNNING PreemptTime=None")
    assert state.describe_loss() == "job 3 is RUNNING" and not state.is_being_preempted


def test_what_ended_a_job_last_counts() -> None:
    ends = [
        f"*** JOB 3 ON n1 CANCELLED AT 2026-11-28T08:08:32 {why}***\n" for why in ("DUE TO PREEMPTION ", "")
    ]
    assert tells_of_preemption(ends[1] + ends[0] + "a line\n")
    assert not tells_of_preemption(ends[0] + ends[1]) and not tells_of_preemption("")


def test_variables_that_would_take_the_place_of_the_script_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sbatch itself believes them more than its script; what the site sets for all others stays."""
    wish = submission.Wish(
        num_nodes=1,
        ranks_per_node=1,
        options={"partition": "gpu", "time": "5"},
        python=None,
        is_requeued=False,
        name="train",
    )
    for name in ("WAIT", "SIGNAL", "REQUEUE", "PARTITION", "TIMELIMIT", "ACCOUNT"):
        monkeypatch.setenv(f"SBATCH_{name}", "x")
    said = command.ask(["env"], lambda: None, without=submission._list_unwanted(wish))
    assert [line for line in said.splitlines() if line.startswith("SBATCH_")] == ["SBATCH_ACCOUNT=x"]


def test_the_script_of_a_job() -> None:
    options = {"partition": "gpu", "exclusive": True, "comment": "a b; c", "p": "low"}
    wish = submission.Wish(
        num_nodes=2, ranks_per_node=4, options=options, python=None, is_requeued=True, name="train"
    )
    assert submission._make_script(wish, "exec true", "/a b/job.log").splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=notebook_accel-train",
        "#SBATCH --partition=gpu",
        "#SBATCH --exclusive",
        "#SBATCH --comment='a b; c'",
        "#SBATCH -p low",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --output='/a b/job.log'",
        "#SBATCH --error='/a b/job.log'",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "exec true",
    ]


@pytest.mark.parametrize(("said", "job_id"), [("7\n", "7"), ("a remark\n12;red\n", "12")])
def test_the_number_of_a_job_is_read(said: str, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = submission.Wish(
        num_nodes=1, ranks_per_node=1, options={}, python=None, is_requeued=False, name="x"
    )
    monkeypatch.setattr(command, "ask", lambda *_: said)
    assert submission.submit(wish)[0] == job_id
    monkeypatch.setattr(command, "ask", lambda *_: "nothing")
    with pytest.raises(LaunchError, match="sbatch has said no number of a job: 'nothing'"):
        submission.submit(wish)
