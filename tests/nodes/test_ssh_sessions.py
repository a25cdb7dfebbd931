"""Sessions over ssh that lose a rank or a host: what is said of the other ranks is what a launch says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.ssh_hosts import KEEPS, SshHosts, find_client
from tests.notebooks.kernel import Kernel, prepare_kernel, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in KEEPS.items()],
]

PATIENCE = 180
SETUP = """
import os, signal, time
import torch
import torch.distributed as dist
from pathlib import Path
from notebook_accel import PartialState, Session, notebook_launcher
HOSTS = ["node1", "node2"]

def meet(folder):
    "Rank 1 dies when a file is there, while rank 0 waits for it in a collective."
    PartialState()
    if os.environ["RANK"] == "1":
        print("go", flush=True)
        while not Path(folder, "die").exists():
            time.sleep(0.01)
        Path(folder, "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))

def in_session(folder):
    with Session(hosts=HOSTS) as session:
        session.run(meet, folder)

def in_launch(folder):
    notebook_launcher(meet, (folder,), hosts=HOSTS)
"""


@pytest.fixture(scope="module")
def kernel(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = hosts.start_kernel(tmp_path_factory.mktemp("ssh"))
    with prepare_kernel(kernel, SETUP, timeout=PATIENCE):
        yield kernel


@pytest.mark.parametrize("how", ["in_session", "in_launch"])
def test_the_rank_that_died_is_named_also_where_that_is_heard_late(
    kernel: Kernel, tmp_path: Path, how: str
) -> None:
    """The connection of its host is slow, and that between ranks is not: rank 0 says first that something is wrong."""

    def die() -> None:
        client = find_client(kernel, "node2")
        client.suspend()
        try:
            (tmp_path / "die").touch()
            assert wait_until((tmp_path / "pid").exists, PATIENCE)
            time.sleep(
                2
            )  # more than a session gives the others, and less than a launch waits for the end of a peer
        finally:
            client.resume()

    cell = kernel.run(f"{how}({str(tmp_path)!r})", timeout=PATIENCE, during=die)
    assert cell.error is not None and cell.error[0] == "WorkerKilledError", cell.traceback
    assert re.search(r"rank 1 \(on node2, process \d+\) was ended by SIGKILL", cell.error[1]), cell.error
    assert re.search(r"rank 0 \(on node1, process \d+\) lost rank 1, which had failed", cell.told), cell.told


def test_a_module_beside_the_notebook_is_found_where_the_notebook_has_changed_its_folder(
    kernel: Kernel,
) -> None:
    """The last folder is removed meanwhile: ranks begin where their host lets them."""
    cell = kernel.run(
        """
        began = os.getcwd()
        with open("beside.py", "w") as file:
            file.write("def say():\\n    return 'from a file'\\n")
        import beside
        os.mkdir("changed")
        os.chdir("changed")
        os.rmdir("../changed")
        try:
            found = notebook_launcher(beside.say, hosts=HOSTS, returns="all", view="text")
        finally:
            os.chdir(began)
        found
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "['from a file', 'from a file']"
