"""SLURM's commands: the client that starts agents by `srun`, and what `scontrol` says of a job."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from .... import environ, interrupts
from ....errors import LaunchError
from ....trust import secret
from ..remote.client import CommandClient, Wanted, make_script

_LOOK_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 60.0
_CONFIG_SECONDS: Final = 10.0
_FIELD: Final = re.compile(r"([A-Z]\w*)=(\S*)")
_STAMP: Final = "%Y-%m-%dT%H:%M:%S"
_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OPTIONS: Final = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",
    "--cpu-bind=none",
    "--mem=0",
    "--mpi=none",
    "--export=ALL",
    "--kill-on-bad-exit=0",
    "--job-name=notebook_accel",
)
WAITING: Final = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
                            "COMPLETING", "RESIZING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"})  # fmt: skip
"""States of a job that may run later."""
RUNNING: Final = "RUNNING"
ENDING: Final = "COMPLETING"
CANCELLED: Final = "CANCELLED"
PREEMPTED: Final = "PREEMPTED"
_SAID_OF_PREEMPTION: Final = "DUE TO PREEMPTION ***"
_ENDS: Final = ("BootFail", "DeadLine", "Dependency", "InactiveLimit", "JobLaunchFailure", "LaunchFailure",
                "NodeDown", "NodeFail", "NonZeroExitCode", "OutOfMemory", "Preempt", "RaisedSignal", "SystemFailure",
                "TimeLimit")  # fmt: skip
"""How reasons begin that are about the end of a job; the others say why it once waited."""


@dataclass(frozen=True)
class SrunClient(CommandClient):
    """`srun`, which starts a step of a job on one of its nodes.

    Attributes:
        job_id: number of the job.
        lock: path of the file that the agent on the job's first node locks; empty where the job is not ours.
        first: that node.
        seconds: how long an agent stays without a run.
    """

    program: ClassVar[str] = "srun"
    connection: ClassVar[str] = "srun step"
    host_noun: ClassVar[str] = "node"
    job_id: str
    lock: str = ""
    first: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def warm_seconds(self) -> float:
        """How long an agent stays without a run."""
        return self.seconds

    def make_command(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> list[str]:
        """Return the command that starts the agent on a node."""
        script = make_script(python, nonce, wanted, self.seconds, self.lock if host == self.first else "")
        return ["srun", f"--jobid={self.job_id}", f"--nodelist={host}", *_OPTIONS, "sh", "-c", script]

    def make_environment(self) -> Mapping[str, str] | None:
        """Return this process's variables without those by which a job that it runs in changes srun's options."""
        return make_environment()

    def explain_failure(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Return why no agent has started, as a sentence."""
        telling = self.find_telling_line(said) or "it says nothing"
        if code is None:
            return f"node {host}: srun still waits for its step of job {self.job_id} ({telling})"
        return f"node {host}: srun ended with code {code} ({telling})"

    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return the first line that names an error, else the last one."""
        lines = [line.strip() for line in said if line.strip() and "support for cpu binding" not in line]
        errors = [line for line in lines if "error:" in line]
        return (errors or lines[-1:] or [""])[0][:300]


def make_environment(without: Collection[str] = ()) -> dict[str, str]:
    """Return this process's variables for SLURM's commands, without those of a job that it runs in.

    Args:
        without: others that are left out.
    """
    own = environ.snapshot()
    return {
        name: text
        for name, text in own.items()
        if (not name.startswith(("SLURM_", "SRUN_")) or name in _KEPT)
        and name != secret.VARIABLE
        and name not in without
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What SLURM says of a job.

    Attributes:
        job_id: its number.
        state: such as `PENDING`; `UNKNOWN` where SLURM does not know it any more.
        reason: why it waits or has ended; empty for none. SLURM may leave there why a job waited that has ended.
        start: when it begins or began, in seconds since the epoch; None where nobody knows.
        end: when it has ended, or its time limit ends it; None where nobody knows.
        node_list: its nodes, as SLURM writes them.
        restarts: how often it was queued again.
        submitted: when it was submitted, or queued again; None where nobody knows.
        exit_code: of its own process, once it is over.
        signum: number of the signal that ended that process; 0 for none.
        preempted: when another job was given its nodes, in seconds since the epoch; None where none was. SLURM forgets
            it where it queues the job again.
    """

    job_id: str
    state: str
    reason: str = ""
    start: float | None = None
    end: float | None = None
    node_list: str = ""
    restarts: int = 0
    submitted: float | None = None
    exit_code: str = ""
    signum: int = 0
    preempted: float | None = None

    @property
    def is_being_preempted(self) -> bool:
        """Whether it runs on, and ends soon: sites may give a job some time whose nodes another one gets."""
        return self.is_running and self.preempted is not None

    @property
    def is_running(self) -> bool:
        """Whether steps can start."""
        return self.state == RUNNING

    @property
    def is_over(self) -> bool:
        """Whether the job will never run again."""
        return _is_over(self.state)

    def find_notice(self, seconds: float) -> float:
        """Return how long before its end ranks are told of its time limit; half of a short job is for work.

        Args:
            seconds: of a long job.
        """
        if self.start is None or self.end is None:
            return seconds
        return min(seconds, (self.end - self.start) / 2)

    def is_nearly_over(self, notice: float) -> bool:
        """Return whether its time limit is so near that ranks are told of it.

        Args:
            notice: see `find_notice`.
        """
        return self.end is not None and self.end - time.time() <= self.find_notice(notice)

    def describe(self) -> str:
        """Return state and reason, such as `PENDING (Resources)`; of a job that has ended, the reason of its end."""
        is_old = self.is_over and not self.reason.startswith(_ENDS)
        return self.state if is_old or not self.reason else f"{self.state} ({self.reason})"

    def describe_loss(self, *, is_preempted: bool = False) -> str:
        """Return what became of a job whose ranks ran, as a clause.

        Args:
            is_preempted: whether another job has got its nodes; SLURM may not say so here any more.
        """
        if is_preempted or self.preempted is not None or self.state == PREEMPTED:
            again = "" if self.is_over or self.is_running else f", and is queued again: {self.describe()}"
            return f"job {self.job_id} was preempted: another job got its nodes{again}"
        if self.state == CANCELLED:
            return f"job {self.job_id} was cancelled from outside while its ranks ran"
        return f"job {self.job_id} {'has ended:' if self.is_over else 'is'} {self.describe()}"


def ask(
    words: Sequence[str],
    check: Callable[[], object],
    text: str = "",
    seconds: float = _ANSWER_SECONDS,
    without: Collection[str] = (),
) -> str:
    """Return what a command of SLURM writes.

    Args:
        words: the command.
        check: called several times a second; its exception ends the command.
        text: for its input.
        seconds: how long it may take.
        without: variables that it does not get.

    Raises:
        LaunchError: it has failed, or does not answer. The text is the command's own.
    """
    with interrupts.block_interrupt_in_children():
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",  # folders and comments may have any bytes
            env=make_environment(without),
            start_new_session=True,
        )
    with process:
        deadline = time.monotonic() + seconds
        given: str | None = text
        while True:
            try:
                written, said = process.communicate(given, timeout=_LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                given = None
            try:
                check()
                if time.monotonic() > deadline:
                    raise LaunchError(f"{words[0]} does not answer within {seconds:g} s")
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        raise LaunchError("; ".join(lines[:3]) or f"{words[0]} ended with code {process.returncode}")
    return written


def look(job_id: str, check: Callable[[], None]) -> JobState:
    """Return what SLURM says of a job.

    Args:
        job_id: its number.
        check: called several times a second; its exception ends the wait.

    Raises:
        LaunchError: SLURM does not answer.
    """
    try:
        text = ask(["scontrol", "show", "job", "--oneliner", job_id], check)
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return JobState(job_id=job_id, state="UNKNOWN")
        raise
    return parse_job(job_id, text)


def _is_over(state: str) -> bool:
    return state not in WAITING and state != RUNNING


def parse_job(job_id: str, text: str) -> JobState:
    """Return what a line of `scontrol show job --oneliner` says.

    Args:
        job_id: the job's number.
        text: the line.
    """
    found: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        found.setdefault(name, value)
    reason = found.get("Reason", "")
    nodes = found.get("NodeList", "")
    restarts = found.get("Restarts", "0")
    code, _, signum = found.get("ExitCode", "").partition(":")
    state = found.get("JobState", "UNKNOWN")
    has_end = found.get("TimeLimit") != "UNLIMITED" or _is_over(state)
    return JobState(
        job_id=job_id,
        state=state,
        reason="" if reason in ("None", "(null)") else reason,
        start=_parse_time(found.get("StartTime", "")),
        end=_parse_time(found.get("EndTime", "")) if has_end else None,
        node_list="" if nodes == "(null)" else nodes,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        submitted=_parse_time(found.get("SubmitTime", "")),
        exit_code=code,
        signum=int(signum) if signum.isdecimal() else 0,
        preempted=_parse_time(found.get("PreemptTime", "")),
    )


def tells_of_preemption(text: str) -> bool:
    """Return whether the last that SLURM wrote of an end is that another job got the nodes.

    Args:
        text: what a step or a job has written to its errors.
    """
    return _SAID_OF_PREEMPTION in text[text.rfind("CANCELLED AT ") :]


def _parse_time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, _STAMP))
    except (ValueError, OverflowError):
        return None


def find_cluster() -> str:
    """Return the name of the cluster whose commands are used here; empty where SLURM does not say it."""
    try:
        text = ask(["scontrol", "show", "config"], lambda: None, seconds=_CONFIG_SECONDS)
    except (LaunchError, OSError):
        return ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found is not None else ""


def list_nodes(state: JobState, check: Callable[[], None]) -> list[str]:
    """Return the names of a job's nodes, in SLURM's order."""
    return ask(["scontrol", "show", "hostnames", state.node_list], check).split()


def find_missing() -> str:
    """Return the command of SLURM that is not here, empty where all are."""
    search = environ.get("PATH") or os.defpath
    return next(
        (name for name in ("srun", "sbatch", "scontrol") if shutil.which(name, path=search) is None), ""
    )


def start_watcher(job_id: str) -> subprocess.Popen[bytes]:
    """Start a process that cancels a job when its input ends: with this process, however that ends."""
    with interrupts.block_interrupt_in_children():
        return subprocess.Popen(
            ["sh", "-c", 'read _; exec scancel "$0"', job_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=make_environment(),
            start_new_session=True,
        )


def kill_watcher(watcher: subprocess.Popen[bytes]) -> None:
    """End a watcher without a cancel: the job has ended."""
    watcher.send_signal(signal.SIGTERM)
    if watcher.stdin is not None:
        watcher.stdin.close()
    watcher.wait()
