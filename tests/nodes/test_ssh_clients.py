"""What users have in their ssh config: a jump host, and connections that several clients share."""

from __future__ import annotations

import ast
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.nodes.ends import assert_gone, read_pids
from tests.nodes.ssh_hosts import KEEPS, SshHosts, make_hosts, why_no_hosts
from tests.notebooks.kernel import wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in KEEPS.items()],
]

PATIENCE = 180
JUMP = """
Host node1 node2
    ProxyJump jump
Host jump
    HostName {jump}
    User root
    IdentityFile {folder}/id
"""
SHARE = """
Host *
    ControlMaster auto
    ControlPath {sockets}/%C
    ControlPersist 600
"""
SETUP = """
import os, subprocess, time
import psutil
from notebook_accel import PartialState, notebook_launcher
from notebook_accel.utils import gather
import torch

def launch(function, *args, **more):
    return notebook_launcher(function, args, hosts=["node1", "node2"], **more)

def place():
    ranks = gather(torch.tensor([PartialState().process_index])).tolist()
    return ranks, os.environ["SSH_CONNECTION"].split()[0], os.getppid()

def wait(notes):
    child = subprocess.Popen(["sleep", "1000"])
    with open(notes, "a") as file:
        print(os.getpid(), child.pid, *[parent.pid for parent in psutil.Process().parents()[:2]], file=file)
    PartialState().wait_for_everyone()
    if os.environ["RANK"] == "0":
        print("go", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts, and a third one by which they may be reached."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with make_hosts(tmp_path_factory.mktemp("hosts"), count=3) as made:
        yield made


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder for the sockets of shared connections, with a short path."""
    with tempfile.TemporaryDirectory(prefix="ssh", dir="/tmp") as folder:
        yield folder


def list_shared(sockets: str) -> list[psutil.Process]:
    """Return the connections that clients share."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            found += [process] if title.startswith("ssh: ") and sockets in title and "[mux]" in title else []
    return found


def end_shared(sockets: str) -> None:
    for process in list_shared(sockets):
        process.terminate()
    assert wait_until(lambda: not list_shared(sockets), PATIENCE)


def list_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def list_commands(processes: list[psutil.Process]) -> dict[psutil.Process, list[str]]:
    """Return the words of each process that has not ended meanwhile."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found[process] = process.cmdline()
    return found


@pytest.mark.parametrize("settings", [JUMP, SHARE, JUMP + SHARE], ids=["jump", "shared", "both"])
def test_launches_by_the_connections_of_the_user(
    hosts: SshHosts, tmp_path: Path, sockets: str, settings: str
) -> None:
    jump = hosts.network.addresses[3]
    kernel = hosts.start_kernel(tmp_path, settings.format(jump=jump, folder=hosts.folder, sockets=sockets))
    try:
        kernel.run(SETUP, timeout=PATIENCE).ok()
        twice = "[[launch(place, returns='all') for _ in range(2)] for _ in [0]][0]"
        first, second = ast.literal_eval(kernel.run(twice, timeout=PATIENCE).ok().value)
        assert first == second, "by the connections of the first launch"
        came_from = jump if settings.startswith(JUMP) else hosts.network.addresses[0]
        assert [each[:2] for each in first] == [([0, 1], came_from)] * 2
        notes = tmp_path / "interrupted"
        cell = kernel.run(f"launch(wait, {str(notes)!r})", timeout=PATIENCE, during=kernel.interrupt)
        assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
        # a shared connection stays as long as the user has said, with the way through a jump host that it has
        is_shared = settings != JUMP
        commands = list_commands(psutil.Process(kernel.pid).children(recursive=True))
        assert any("node2" in words for words in commands.values())
        processes = [
            process
            for process, words in commands.items()
            if not (is_shared and {"-W", "[mux]"} & set(" ".join(words).split()))
        ]
        moments: list[float] = []

        def kill() -> None:
            kernel.kill()
            moments.append(time.monotonic())
            raise InterruptedError

        noted = tmp_path / "killed"
        with pytest.raises(InterruptedError):
            kernel.run(f"launch(wait, {str(noted)!r})", timeout=PATIENCE, during=kill)
        assert len(read_pids(noted)) == 8, "with the agents from which ranks are forked, and who holds these"
        assert_gone([*read_pids(notes), *read_pids(noted)], moments[0])
        assert wait_until(lambda: not list_running(processes), 30), list_running(processes)
        assert len(list_shared(sockets)) == {JUMP: 0, SHARE: 2, JUMP + SHARE: 3}[settings]
    finally:
        kernel.close()
        end_shared(sockets)
