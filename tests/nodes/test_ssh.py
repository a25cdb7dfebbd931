"""Launches by ssh on two hosts: ranks and sessions, what is told before anything starts, and whose end ends what."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from notebook_accel.launch.engines.remote.keep_alive import SILENCE_SECONDS
from tests.nodes.ends import CUT_SECONDS, assert_gone, assert_in_time, read_pids
from tests.nodes.ssh_hosts import KEEPS, NFT, SshHosts, find_client
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
from notebook_accel import PartialState, notebook_launcher, runs
from notebook_accel.utils import gather
%load_ext notebook_accel
HOSTS = ["node1", "node2"]

def launch(function, *args, hosts=HOSTS, **more):
    return notebook_launcher(function, args, hosts=hosts, **more)

def wait(notes="/dev/null"):
    child = subprocess.Popen(["sleep", "1000"])
    with open(notes, "a") as file:
        print(os.getpid(), child.pid, file=file)
    PartialState().wait_for_everyone()
    if os.environ["RANK"] == "0":
        print("go", flush=True)
    time.sleep(1000)
"""

LOCAL_CLIENT = """#!/bin/sh
for word; do [ "$word" != node2 ] || exec ssh "$@"; done
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
cd / && exec sh -c "$word"
"""


@pytest.fixture(scope="module")
def kernel(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = hosts.start_kernel(tmp_path_factory.mktemp("ssh"))
    with prepare_kernel(kernel, SETUP, timeout=PATIENCE):
        yield kernel


def test_eight_ranks_on_two_hosts(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def seen():
            state = PartialState()
            ranks = gather(torch.tensor([state.process_index])).tolist()
            names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
            return ranks, [int(os.environ[name]) for name in names], os.environ["GLOO_SOCKET_IFNAME"]

        values = launch(seen, hosts=["node1:5", "root@node2:3"], returns="all")
        values, runs()[-1].record.nodes
        """,
        timeout=PATIENCE,
    ).ok()
    values, nodes = ast.literal_eval(cell.value)
    assert nodes == {**dict.fromkeys(range(5), "node1"), **dict.fromkeys(range(5, 8), "root@node2")}
    places = [[rank, 5, 0, 2, 8] for rank in range(5)] + [[rank, 3, 1, 2, 8] for rank in range(3)]
    assert values == [(list(range(8)), place, "eth0") for place in places]
    assert "Launching seen on 8 processes by ssh: node1 (5), root@node2 (3)" in cell.stdout
    assert "Welcome" not in cell.stdout + cell.stderr


def test_a_second_launch_finds_all_that_it_needs(kernel: Kernel) -> None:
    """The process that has imported torch, from which ranks are forked, is the same on each host."""
    cell = kernel.run(
        """
        from unittest import mock
        from notebook_accel.launch.engines.remote import hosts_group, pool
        with (mock.patch.object(hosts_group, "_CLEAR_SECONDS", 60.0),
              mock.patch.object(pool, "_PROOF_SECONDS", 60.0)):  # a busy machine answers late
            first, second = (launch(os.getppid, returns="all") for _ in range(2))
        alone = launch(lambda: os.environ["MASTER_ADDR"], hosts=["node1"])
        first == second, len(set(first)), alone
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "(True, 2, '127.0.0.1')"


def test_a_host_that_ssh_reaches_by_a_loopback_address(
    kernel: Kernel, hosts: SshHosts, tmp_path: Path
) -> None:
    """Its first address is one that no other host reaches, as that of a bridge of containers."""
    own = ["172.17.0.1/32", "dev", "lo"]
    subprocess.run(["ip", "-n", hosts.network.names[0], "address", "add", *own], check=True)
    client = tmp_path / "ssh"
    client.write_text(LOCAL_CLIENT)
    client.chmod(0o755)
    try:
        cell = kernel.run(
            f"""
            from notebook_accel.launch.engines.remote.pool import get_pool
            from notebook_accel.launch.engines.ssh.engine import SshEngine

            def meet():
                assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0", os.environ["MASTER_ADDR"]
                return gather(torch.tensor([PartialState().process_index])).tolist()

            engine = SshEngine(["localhost", "node2"], ssh={str(client)!r})
            values = notebook_launcher(meet, engine=engine, returns="all")
            get_pool().close()  # other tests look for the client that leads to node2
            values
            """,
            timeout=PATIENCE,
        ).ok()
    finally:
        subprocess.run(["ip", "-n", hosts.network.names[0], "address", "delete", *own], check=True)
    assert cell.value == "[[0, 1], [0, 1]]"


needs_firewall = pytest.mark.skipif(not os.path.exists(NFT), reason="needs nft (apt package nftables)")


@needs_firewall
def test_a_firewall_that_lets_only_ssh_through(kernel: Kernel, hosts: SshHosts) -> None:
    code = """
        def add_up():
            print("from", os.environ["RANK"])
            return gather(torch.tensor([PartialState().process_index + 1])).tolist()

        launch(add_up)
        """
    with hosts.firewall(between_hosts=False):
        cell = kernel.run(code, timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == [1, 2]
    assert {"[0] from 0", "[1] from 1"} <= set(cell.lines)


@needs_firewall
def test_hosts_that_cannot_reach_each_other_are_told(kernel: Kernel, hosts: SshHosts) -> None:
    code = """
        def add_up():
            return gather(torch.tensor([PartialState().process_index + 1])).tolist()

        launch(add_up)
        """
    with hosts.firewall(between_hosts=True):
        cell = kernel.run(code, timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert re.search(
        r"host node[12]: it cannot connect to node[12] at 10\.\d+\.\d+\.\d+:\d+ \(no answer", cell.error[1]
    )
    assert "firewall" in cell.error[1]
    assert ast.literal_eval(kernel.run(code, timeout=PATIENCE).ok().value) == [1, 2]


def test_what_is_wrong_with_all_hosts_is_told_at_once(
    kernel: Kernel, hosts: SshHosts, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text(
        '#!/bin/sh\nshift\nexec python3 -c "import sys; sys.version_info = (3, 8, 1); exec(sys.argv.pop(1))" "$@"\n'
    )
    old.chmod(0o755)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {kernel.run("sys.executable").ok().value[1:-1]} -I -S "$@"\n')
    bare.chmod(0o755)
    cell = kernel.run(
        f"""
        python = {{"node1": {str(old)!r}, "node2": {str(bare)!r}, "root@node2": "/no/python"}}
        launch(wait, hosts=["node1", "node2", "root@node2", "locked", "unknown", "nowhere.invalid"], python=python)
        """,
        timeout=PATIENCE,
    )
    assert cell.error is not None and cell.error[0] == "ValueError" and not cell.stdout
    text = cell.error[1]
    assert "host node1: " in text and "is Python 3.8.1, and this process Python 3." in text
    assert re.search(r"host node2: .* does not have (torch|notebook_accel): install it there", text)
    assert "host root@node2: there is no /no/python" in text
    assert "host locked: ssh would have to ask for a password" in text
    assert "host unknown: its host key is unknown here: run `ssh unknown` once" in text
    assert "host nowhere.invalid: ssh does not reach it (ssh: Could not resolve hostname" in text
    cell = kernel.run("launch(wait, hosts=['node1:2', 'node2'], num_processes=2)", timeout=PATIENCE)
    assert (
        cell.error is not None
        and "num_processes=2: hosts= makes 3 (2 on node1 + 1 on node2)" in cell.error[1]
    )


def test_a_missing_file_is_told_with_its_host(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def read():
            if os.environ["RANK"] == "1":
                open("/no/such/file")  # here
            time.sleep(100)

        launch(read)
        """,
        timeout=PATIENCE,
    )
    assert cell.error is not None and cell.error[0] == "FileNotFoundError"
    assert 'open("/no/such/file")  # here' in cell.traceback
    assert "rank 1 is on host node2, and the file is not there" in cell.told


def lose(kernel: Kernel, folder: Path, act: Callable[[], None]) -> tuple[Cell, list[int], float]:
    """Launch ranks that wait, do something to them, and return the cell, what ran, and when it was done."""
    moments: list[float] = []

    def during() -> None:
        act()
        moments.append(time.monotonic())

    notes = folder / "pids"  # what is said on a connection that ends may be lost
    cell = kernel.run(f"launch(wait, {str(notes)!r})  # go", timeout=PATIENCE, during=during)
    assert_in_time(moments[0])
    pids = read_pids(notes)
    assert len(pids) == 4, cell.stdout
    return cell, pids, moments[0]


def test_a_cut_link_ends_what_ran_behind_it(kernel: Kernel, hosts: SshHosts, tmp_path: Path) -> None:
    try:
        cell, pids, since = lose(kernel, tmp_path, lambda: hosts.network.cut(2, up=False))
        assert cell.error is not None and cell.error[0] == "WorkerError"
        assert re.search(r"rank 1 \(on node2, process \d+\) is lost: host node2: ", cell.error[1])
        assert_gone(pids, since, CUT_SECONDS)
    finally:
        hosts.network.cut(2, up=True)
    cell = kernel.run("launch(lambda: os.environ['RANK'], returns='all')", timeout=PATIENCE).ok()
    assert cell.value == "['0', '1']"


def test_a_link_that_is_down_for_ten_seconds(kernel: Kernel, hosts: SshHosts, tmp_path: Path) -> None:
    """The ranks reach each other only after that, too."""
    is_cut = tmp_path / "is cut"
    kernel.run(
        f"""
        def steps():
            print("began", flush=True)
            while not os.path.exists({str(is_cut)!r}):
                time.sleep(0.05)
            time.sleep(12)
            for step in range(20):
                gather(torch.ones(1))
                print("step", step, flush=True)
            return step

        run = launch(steps, block=False, returns="all")
        while len(run.lines()) < 2:
            time.sleep(0.05)
        """,
        timeout=PATIENCE,
    ).ok()
    hosts.network.cut(2, up=False)
    is_cut.touch()
    time.sleep(10)
    hosts.network.cut(2, up=True)
    cell = kernel.run("run.wait(60)\nrun.status, str(run.failure), run.lines(1)[-1]", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == ("done", "None", "step 19")


def test_a_killed_client_ends_what_it_led_to(kernel: Kernel, tmp_path: Path) -> None:
    def kill() -> None:
        find_client(kernel, "node2").kill()

    cell, pids, since = lose(kernel, tmp_path, kill)
    assert cell.error is not None and "is lost: host node2: its ssh connection has ended" in cell.error[1]
    assert "ssh was ended by SIGKILL" in cell.error[1]
    assert_gone(pids, since)


def test_a_connection_that_rests_and_says_nothing_more_is_replaced(kernel: Kernel) -> None:
    """As where a laptop has moved to another network: nothing has told it that the old one is gone."""
    kernel.run("launch(lambda: None)", timeout=PATIENCE).ok()
    silent = find_client(kernel, "node2")
    silent.suspend()
    cell = kernel.run(
        """
        from notebook_accel.launch.engines.remote import link
        before, link._PROVEN_SECONDS = link._PROVEN_SECONDS, 0.0  # the answer at the last one's end is long ago
        try:
            values = launch(lambda: os.environ["RANK"], returns="all")
        finally:
            link._PROVEN_SECONDS = before
        values
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "['0', '1']"
    assert not silent.is_running()


def test_workers_start_again_on_a_host_that_was_lost(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import psutil

        def once():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
                agent = psutil.Process().parent().parent()
                agent.kill()
                time.sleep(100)
            return "again"

        launch(once, max_restarts=1)
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "'again'" and "restart 1 of 1" in cell.stdout + cell.stderr


def test_a_restart_waits_for_a_host_that_comes_back(kernel: Kernel, hosts: SshHosts, tmp_path: Path) -> None:
    def restart() -> None:
        began = [tmp_path / f"began{rank}" for rank in (0, 1)]
        assert wait_until(lambda: all(file.exists() for file in began), 100)
        with hosts.server_gone(1):
            assert wait_until((tmp_path / "waits").exists, 100)

    kernel.run(
        f"""
        from pathlib import Path

        def twice():
            rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
            Path({str(tmp_path)!r}, "began" + rank).touch()
            while start == "0":
                time.sleep(0.05)
            return start

        run = launch(twice, max_restarts=1, block=False)
        """,
        timeout=PATIENCE,
    ).ok()
    cell = kernel.run(
        f"""
        print("go", flush=True)
        while "Waiting for hosts" not in run.record.notice:
            time.sleep(0.05)
        Path({str(tmp_path)!r}, "waits").touch()
        run.result(), run.record.restarts
        """,
        timeout=PATIENCE,
        during=restart,
    ).ok()
    assert ast.literal_eval(cell.value) == ("1", 1)


def test_a_restart_gives_a_host_up_that_stays_away(kernel: Kernel, hosts: SshHosts, tmp_path: Path) -> None:
    cell = kernel.run(
        f"""
        import pathlib

        def once():
            pathlib.Path({str(tmp_path)!r}, "began" + os.environ["RANK"]).touch()
            time.sleep(1000)

        run = launch(once, max_restarts=1, block=False, rdzv_conf={{"join_timeout": 3}})
        """,
        timeout=PATIENCE,
    ).ok()
    began = [tmp_path / f"began{rank}" for rank in (0, 1)]
    assert wait_until(lambda: all(file.exists() for file in began), 100)
    with hosts.server_gone(1):
        cell = kernel.run(
            "run.wait(), run.status, str(run.failure), run.record.notice", timeout=PATIENCE
        ).ok()
    assert "'failed'" in cell.value and "is lost" in cell.value
    assert "no restart 1 of 1" in cell.value and "join_timeout" in cell.value


def test_ranks_stop_at_the_same_step_and_outlive_a_kernel_that_stands_still(kernel: Kernel) -> None:
    """Agents hear nothing of a kernel that is stopped, or holds Python's lock."""
    kernel.run(
        """
        from notebook_accel import Accelerator, print_metrics

        def steps():
            accelerator = Accelerator()
            for step in range(1_000_000):
                print_metrics(step=step, loss=float(step))
                accelerator.gather(torch.ones(1))
                if accelerator.should_stop:
                    return step

        run = launch(steps, block=False, returns="all", output="none")
        while not run.metrics:
            time.sleep(0.05)
        """,
        timeout=PATIENCE,
    ).ok()
    process = psutil.Process(kernel.pid)
    process.suspend()
    try:
        time.sleep(SILENCE_SECONDS + 2)
    finally:
        process.resume()
    cell = kernel.run("status = run.status\nrun.stop()\nstatus, *run.result()", timeout=PATIENCE).ok()
    status, first, second = ast.literal_eval(cell.value)
    assert status == "running" and first == second > 0


def test_asking_whether_to_stop_is_no_collective(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from notebook_accel import Accelerator

        def ask():
            accelerator = Accelerator()
            asked = [accelerator.should_stop for _ in range(3 if accelerator.is_main_process else 40)]
            return len(asked), any(asked), int(accelerator.gather(torch.ones(1)).sum())

        launch(ask, returns="all")
        """,
        timeout=PATIENCE,
    ).ok()
    assert ast.literal_eval(cell.value) == [(3, False, 2), (40, False, 2)]


def test_a_killed_kernel_ends_everything(hosts: SshHosts, tmp_path: Path) -> None:
    other = hosts.start_kernel(tmp_path)
    moments: list[float] = []

    def kill() -> None:
        other.kill()
        moments.append(time.monotonic())
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
        pids = read_pids(marker)
        assert len(pids) == 6
        assert_gone(pids, moments[0])
    finally:
        other.close()


def test_a_session_on_two_hosts(kernel: Kernel) -> None:
    run = kernel.run
    run("%session --hosts node1 node2", timeout=PATIENCE).ok()
    cell = run(
        """%%distributed
        import os
        import torch
        number = int(os.environ["RANK"])
        print("I am", number)
        total = torch.tensor([number + 1.0])
        torch.distributed.all_reduce(total)
        total.item()
        """.replace("\n        ", "\n"),
        timeout=PATIENCE,
    ).ok()
    assert sorted(cell.lines) == ["[0] I am 0", "[0] Out: 3.0", "[1] I am 1", "[1] Out: 3.0"]
    cell = run(
        """%%distributed
        print("go", flush=True)
        if number == 1:
            torch.distributed.all_reduce(total)  # rank 0 does not come
        import time
        time.sleep(100)
        """.replace("\n        ", "\n"),
        timeout=PATIENCE,
        during=kernel.interrupt,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    cell = run("%%rank 1\nopen('/no/such/file')", timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] == "FileNotFoundError"
    assert "rank 1 is on host node2" in cell.told
    cell = run("%%distributed\ntorch.distributed.all_reduce(total)\ntotal.item()", timeout=PATIENCE).ok()
    assert sorted(cell.lines) == ["[0] Out: 6.0", "[1] Out: 6.0"]
    cell = run(
        "session = __import__('notebook_accel').current_session()\nsession.run(lambda: number, returns='all')"
    )
    assert cell.ok().value == "[0, 1]"
    kill = "import psutil\npsutil.Process().parent().parent().kill()\nimport time\ntime.sleep(100)"
    cell = run(f"%%rank 1\n{kill}", timeout=PATIENCE)
    assert cell.error is not None and "is lost: host node2: its ssh connection has ended" in cell.error[1]
    run("%session restart", timeout=PATIENCE).ok()
    assert run("session.run(os.getcwd) != '', session.status").ok().value == "(True, 'idle')"
    run("%session close", timeout=PATIENCE).ok()
