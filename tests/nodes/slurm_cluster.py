"""A SLURM cluster of two nodes on this machine: a controller, and a daemon for each node, with munge of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.notebooks.kernel import Kernel, wait_until
from tests.ports import reserve_port
from tests.stopping import stop

KEEPS = {"children": "connections, and what waits on the nodes, stay for the next launch"}
NODES = ("n1", "n2")
_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_START_SECONDS = 120.0
_END_SECONDS = 180.0  # a node whose word of an end is lost is asked again after a minute or two
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d-%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldPort={port}
JobAcctGatherType=jobacct_gather/none
MessageTimeout=60
MpiDefault=none
KillWait=5
SlurmdTimeout=300
InactiveLimit=0
{more}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def why_no_cluster() -> str:
    """Return why there can be no cluster here; empty where there can."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=search) is None]
    if missing:
        return f"needs SLURM (apt packages slurm-wlm and munge): no {missing[0]}"
    return "" if os.geteuid() == 0 else "needs root: SLURM's daemons start as it"


@dataclass
class SlurmCluster:
    """Nodes `n1` and `n2`, four CPUs each.

    Attributes:
        folder: has the settings and logs.
        tracking: what SLURM takes for the processes of a job: `linuxproc` is all that descend from it, as most sites
            have it by control groups; `pgid` is its process groups, which a process can leave.
        more: settings beside those that all clusters have.
    """

    folder: Path
    tracking: str = "linuxproc"
    more: str = "PreemptType=preempt/none"
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the notebook: SLURM's commands there use this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        with ExitStack() as held:
            self._start(*(held.enter_context(reserve_port()) for _ in range(3)))

    def _start(self, port: int, *ports: int) -> None:
        folder = self.folder
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        text = _CONFIG.format(
            folder=folder,
            tracking=self.tracking,
            host=socket.gethostname().partition(".")[0],
            port=port,
            ports=ports,
            more=self.more,
        )
        (folder / "slurm.conf").write_text(text)
        self._spawn("mungekey", "--create", f"--keyfile={folder}/munge.key").wait()
        files = (
            ("socket", "socket"),
            ("key-file", "key"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
        words = [f"--{option}={folder}/munge.{name}" for option, name in files]
        self._daemons["munge"] = self._spawn("munged", "--foreground", "--force", *words)
        _wait(lambda: (folder / "munge.socket").exists())
        config = ("-f", str(folder / "slurm.conf"))
        self._daemons["ctld"] = self._spawn("slurmctld", "-D", *config)
        for node in NODES:
            self.start_node(node)
        _wait(lambda: self.run("sinfo", "-h", "-o", "%t %D", may_fail=True).split() == ["idle", "2"])

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._daemons[node] = self._spawn("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node, as where the machine fails."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let the controller answer nobody meanwhile."""
        stop(self._daemons["ctld"].pid)
        try:
            yield
        finally:
            self._daemons["ctld"].send_signal(signal.SIGCONT)

    def _spawn(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        assert path is not None
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            [path, *words], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def run(self, *words: str, may_fail: bool = False) -> str:
        """Return what a command of SLURM writes; AssertionError with its words where it fails and may not."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert may_fail or done.returncode == 0, (words, done.returncode, done.stderr)
        return done.stdout

    def jobs(self) -> list[str]:
        """Return the numbers of the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%i").split()

    def end_jobs(self) -> None:
        """Cancel all jobs, and wait for their end."""
        if jobs := self.jobs():
            self.run("scancel", *jobs, may_fail=True)  # one may have just ended
        assert wait_until(lambda: not self.jobs(), _END_SECONDS), self.run("scontrol", "show", "job")

    def requeue(self) -> None:
        """Let SLURM queue its only job again, without the two minutes that it would leave the nodes alone."""
        self.run("scontrol", "requeue", *self.jobs())
        self.start_again()

    def start_again(self) -> None:
        """Let the only job, which SLURM is queueing again, start at once.

        What has ended of its first start is still told to SLURM meanwhile, which may take it for the second one's;
        sites leave two minutes between the two.
        """
        (job,) = self.jobs()
        state = ("squeue", "-h", "-j", job, "-o", "%T")
        assert wait_until(lambda: self.run(*state, may_fail=True).strip() == "PENDING", 60)
        assert wait_until(lambda: not _list_steps(job), 60)
        time.sleep(2)  # in the second in which a start was ended, nodes refuse the next one as revoked too
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def stop(self) -> None:
        """End all jobs, and then the daemons."""
        if "ctld" in self._daemons:
            with suppress(AssertionError):
                self.end_jobs()
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def start_kernel(self, folder: Path) -> Kernel:
        """Start a kernel outside of any job."""
        return Kernel(folder, **self.environment)


def _list_steps(job: str) -> list[psutil.Process]:
    """Return the processes of SLURM that watch steps of a job."""
    title = f"slurmstepd: [{job}."
    return [
        each for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or [])
    ]


def _wait(is_so: object) -> None:
    assert callable(is_so)
    deadline = time.monotonic() + _START_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "SLURM is not there in time"
        time.sleep(0.05)


@contextmanager
def keep_idle(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Begin and end without any job, with nodes that answer: on a busy machine they are late now and then."""
    cluster.end_jobs()
    _wait(lambda: set(cluster.run("sinfo", "-N", "-h", "-o", "%T").split()) == {"idle"})
    yield cluster
    cluster.end_jobs()


@contextmanager
def make_cluster(folder: Path, **more: str) -> Iterator[SlurmCluster]:
    """Make a cluster, and remove it afterwards; its files are in a folder with a short path, for its sockets.

    Args:
        folder: of the test.
        more: fields of `SlurmCluster`.
    """
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as short:
        cluster = SlurmCluster(Path(short), **more)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
