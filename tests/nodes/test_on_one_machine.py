"""A run over two nodes, here two processes of this machine that launch the same cell."""

from __future__ import annotations

import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notebook_accel.launch.engines.nodes import link
from notebook_accel.trust import proof
from notebook_accel.trust.secret import OPEN
from tests.ports import reserve_port

HEAD = """
import os, sys, time
import torch, torch.distributed as dist
from notebook_accel import notebook_launcher

node, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def launch(function, **more):
    return notebook_launcher(function, num_processes=2, num_nodes=2, node_rank=node, use_port=port,
                             rdzv_backend=backend, returns="all", **more)

def total():
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a node with the given cell; all nodes of a test share a port."""
    nodes: list[subprocess.Popen[str]] = []

    def start_one(node: int, cell: str, backend: str = "static") -> subprocess.Popen[str]:
        script = tmp_path / f"cell{node}.py"
        script.write_text(HEAD + cell)
        command = [sys.executable, str(script), str(node), str(port), backend]
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return nodes[-1]

    with reserve_port() as port:
        yield start_one
    for node in nodes:
        node.kill()
        node.communicate()


def _outputs(nodes: list[subprocess.Popen[str]], seconds: float = 240) -> list[str]:
    return [node.communicate(timeout=seconds)[0] for node in nodes]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes(start: Start, backend: str) -> None:
    """One rank ends long before the others: nothing is said of it."""
    cell = """
def train():
    import notebook_accel.launch.worker.main as worker
    worker._LAST_COLLECTIVE = 0.2
    print("local", os.environ["LOCAL_RANK"], "of", total())
    time.sleep(0.5 if dist.get_rank() else 0)
    return dist.get_rank()
print(launch(train))
"""
    nodes = [start(node, cell, backend) for node in range(2)]
    outputs = _outputs(nodes)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sorted(output.splitlines()[-1] for output in outputs) == ["[0, 1]", "[2, 3]"]
    for output in outputs:
        assert "waitForInput" not in output
        ranks = output.splitlines()[-1].strip("[]").split(", ")
        lines = sorted(line for line in output.splitlines() if line.startswith("["))
        for local, rank in enumerate(ranks):
            assert f"[{rank}] local {local} of 4" in lines


def test_a_restart_is_one_of_all_nodes(start: Start) -> None:
    cell = """
def train():
    count = total()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return count
    store = dist.distributed_c10d._get_default_store()
    store.add("through", 1)
    while dist.get_rank() == 2:
        if store.add("through", 0) == 4:  # a rank that is not would fail as well
            raise ValueError("only once")
        time.sleep(0.05)
    time.sleep(60)  # nothing tells these ranks but the other node's call
print(launch(train, max_restarts=1))
"""
    nodes = [start(node, cell) for node in range(2)]
    outputs = _outputs(nodes)
    assert [output.splitlines()[-1] for output in outputs] == ["[4, 4]", "[4, 4]"], outputs
    assert "ValueError: only once; restart 1 of 1" in outputs[1]
    told = (
        r"notebook_accel: node 1 \(.*\): rank 2 \(process \d+\) raised ValueError: only once; restart 1 of 1"
    )
    assert re.search(told, outputs[0]), outputs[0]


LOSES = """
def train():
    count = total()
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)  # nothing tells these ranks but the loss of the other node
    return count
try:
    print(launch(train, max_restarts=RESTARTS, rdzv_conf={"join_timeout": 100}))
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_node_that_died_is_waited_for_and_may_come_back(start: Start, backend: str) -> None:
    cell = LOSES.replace("RESTARTS", "1")
    host, doomed = start(0, cell, backend), start(1, cell, backend)
    _wait_for_line(host, "[0] attempt 0")
    _wait_for_line(doomed, "attempt 0")
    doomed.kill()
    _wait_for_line(
        host, "is gone without a word: its kernel has ended, or it is cut off the network; waiting"
    )
    again = start(1, cell, backend)
    outputs = _outputs([host, again])
    assert [output.splitlines()[-1] for output in outputs] == ["[4, 4]", "[4, 4]"], outputs
    assert "attempt 1" in outputs[1] and "attempt 0" not in outputs[1]


def test_a_node_that_does_not_come_back_ends_the_run(start: Start) -> None:
    """The second loss is one more than `max_restarts` allows; where it allows one, the wait has an end."""
    cell = LOSES.replace("RESTARTS", "0")
    host, doomed = start(0, cell), start(1, cell)
    _wait_for_line(doomed, "attempt 0")
    doomed.kill()
    (output,) = _outputs([host])
    assert output.splitlines()[-1].startswith("WorkerError node 1 (") and "is gone" in output, output
    cell = LOSES.replace("RESTARTS", "1").replace("100", "20")
    host, doomed = start(0, cell), start(1, cell)
    _wait_for_line(doomed, "attempt 0")
    doomed.kill()
    (output,) = _outputs([host])
    assert output.splitlines()[-1].startswith("LaunchError node 0 of 2 waited 20 s for node 1"), output


def _wait_for_line(node: subprocess.Popen[str], text: str) -> None:
    assert node.stdout is not None
    seen = []
    while text not in (line := node.stdout.readline()):
        seen.append(line)
        assert line, "".join(seen)


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_waits_for_another_can_be_interrupted(start: Start, node: int) -> None:
    cell = """
print("go", flush=True)
try:
    launch(total)
except KeyboardInterrupt:
    print("interrupted")
"""
    lonely = start(node, cell)
    assert lonely.stdout is not None and lonely.stdout.readline() == "go\n"
    while "waits for node" not in lonely.stdout.readline():
        assert lonely.poll() is None
    lonely.send_signal(signal.SIGINT)
    output = lonely.communicate(timeout=240)[0]
    assert output.splitlines()[-1] == "interrupted", output


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_does_not_come_is_named(start: Start, node: int) -> None:
    lonely = start(node, "launch(total, rdzv_conf={'join_timeout': 1.5})")
    (output,) = _outputs([lonely])
    assert f"LaunchError: node {node} of 2 waited 1.5 s for node {1 - node}" in output


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_node_ends_the_other(start: Start, failing: int) -> None:
    cell = f"""
def train():
    total()
    if node == {failing}:
        raise ValueError("the cause")
    dist.barrier()
launch(train)
"""
    nodes = [start(node, cell) for node in range(2)]
    outputs = _outputs(nodes)
    assert [node.returncode for node in nodes] == [1, 1], outputs
    assert "ValueError: the cause" in outputs[failing]


AGAIN = """
def train(waits):
    count = total()
    print("attempt", waits, flush=True)
    if waits:
        time.sleep(3600)
    return count
try:
    launch(train, args=(True,))
except (KeyboardInterrupt, Exception) as error:
    print("ended by", type(error).__name__, flush=True)
print(launch(train, args=(False,), rdzv_conf={"join_timeout": 100}))
"""


def test_a_cell_that_was_interrupted_and_is_run_again_at_once_is_another_run(start: Start) -> None:
    """The other node is still about to end the first one."""
    nodes = [start(node, AGAIN) for node in range(2)]
    for node in nodes:
        _wait_for_line(node, "attempt True")
    nodes[1].send_signal(signal.SIGINT)
    outputs = _outputs(nodes)
    assert [output.splitlines()[-1] for output in outputs] == ["[4, 4]", "[4, 4]"], outputs
    assert "ended by RunStoppedError" in outputs[0] and "ended by KeyboardInterrupt" in outputs[1]


STANDS_STILL = """
def train():
    total()
    print("works", flush=True)
    for _ in range(25):
        dist.barrier()
        time.sleep(1)
    return dist.get_rank()
print(launch(train))
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system does not tell who is silent")
def test_a_notebook_that_stands_still_for_a_while_is_not_lost(start: Start) -> None:
    """A cell of it holds Python's lock, for example."""
    nodes = [start(node, STANDS_STILL) for node in range(2)]
    for node in nodes:
        _wait_for_line(node, "works")
    nodes[1].send_signal(signal.SIGSTOP)
    time.sleep(18)  # longer than a machine may be silent
    nodes[1].send_signal(signal.SIGCONT)
    outputs = _outputs(nodes)
    assert [output.splitlines()[-1] for output in outputs] == ["[0, 1]", "[2, 3]"], outputs


FINISHED = """
def train():
    total()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if node == 0 and attempt == "0":
        time.sleep(3)
        raise ValueError("late")
    return attempt
print(launch(train, max_restarts=1))
"""


def test_workers_that_had_ended_well_start_again_with_those_of_another_node(start: Start) -> None:
    outputs = _outputs([start(node, FINISHED) for node in range(2)])
    assert [output.splitlines()[-1] for output in outputs] == ["['1', '1']"] * 2, outputs


CELLS = """
import dataclasses, traceback

@dataclasses.dataclass
class Report:
    loss: float

class MyError(Exception):
    pass

def data():
    return {"loss": 0.5, "weights": torch.ones(2, 3), "steps": [1, 2]}

def report():
    return Report(0.5)

def fail():
    if os.environ["RANK"] == "0":
        raise ValueError("the cause")
    time.sleep(60)

def fail_in_own_way():
    if os.environ["RANK"] == "0":
        raise MyError("of my own")
    time.sleep(60)

def show(function, **more):
    try:
        found = notebook_launcher(function, num_processes=1, num_nodes=2, node_rank=node, use_port=port, **more)
    except Exception as error:
        lines = traceback.format_exception(error)
        where = "in fail" if any("in fail" in line for line in lines) else "nowhere"
        print("raised", type(error).__name__, where, error, flush=True)
    else:
        print("returned", found, flush=True)

for more in ({}, {"secret": "correct horse battery staple"}):
    for function in (data, report, fail, fail_in_own_way):
        show(function, **more)
"""


def test_what_travels_between_nodes_with_and_without_a_secret(start: Start) -> None:
    """The documented cell has no secret: nodes exchange data, and exceptions of Python's own."""
    outputs = _outputs([start(node, CELLS) for node in range(2)], seconds=200)
    said = [
        [line for line in output.splitlines() if line.startswith(("returned", "raised"))]
        for output in outputs
    ]
    everything = [
        "returned Report(loss=0.5)",
        "raised ValueError in fail the cause",
        "raised MyError in fail of my own",
    ]
    for lines in said:
        assert len(lines) == 8, outputs
        assert lines[0].startswith("returned {'loss': 0.5, 'weights': tensor([[1.") and lines[0] == lines[4]
        assert lines[5:] == everything
    assert said[0][1:4] == everything, "the node of rank 0 trusts its own worker"
    refused, builtin, own = said[1][1:4]
    assert refused.startswith(
        "raised ShipError nowhere rank 0 is on another node: the returned value cannot be sent"
    )
    assert "it has a __main__.Report" in refused and "NOTEBOOK_ACCEL_SECRET_FILE" in refused
    assert builtin == everything[1]
    assert own == "raised WorkerError in fail MyError: of my own"


def test_nodes_with_different_secrets_do_not_meet(start: Start) -> None:
    """The one that holds the store waits; the other one says why it does."""
    cell = "launch(total, secret=f'a secret of node {node} alone', rdzv_conf={'join_timeout': 12 if node else 600})"
    first = start(0, cell)
    assert first.stdout is not None
    while "waits for node" not in first.stdout.readline():
        assert first.poll() is None
    (output,) = _outputs([start(1, cell)])
    assert "LaunchError: node 1 of 2 waited 12 s for node 0" in output
    assert "(the run there has another secret than this node; " in output


def test_a_run_of_one_machine_listens_on_its_loopback_address_alone(start: Start) -> None:
    """So nobody from outside reaches its coordinator, the store of its ranks, or its nodes."""
    import psutil

    cell = """
def train():
    print("meets", total(), flush=True)
    time.sleep(600)
launch(train)
"""
    host, _ = start(0, cell), start(1, cell)
    _wait_for_line(host, "meets 4")
    found = psutil.Process(host.pid).net_connections()
    listening = [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]
    assert len(listening) >= 2 and set(listening) == {"127.0.0.1"}


def test_a_stranger_who_knows_the_protocol_runs_nothing_and_the_run_goes_on(
    start: Start, tmp_path: Path
) -> None:
    class Touch:
        def __reduce__(self) -> object:
            return Path.touch, (tmp_path / "made",)

    cell = """
def train():
    return total()
print(port, flush=True)
print(launch(train))
"""
    first = start(0, cell)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    hostile = pickle.dumps(("outcome", Touch()))
    for frame in (hostile, b'["outcome", "' + hostile.hex().encode() + b'"]'):
        with _connect(port) as connection:
            proof.answer(connection, OPEN.key, link.PURPOSE)
            connection.sendall(struct.pack("<IQ", 1, len(frame)) + frame)
            while connection.recv(1 << 10):
                pass  # beats; nobody can say what is no message
    outputs = _outputs([first, start(1, cell)])
    assert [output.splitlines()[-1] for output in outputs] == ["[4, 4]", "[4, 4]"], outputs
    assert not (tmp_path / "made").exists()


def _connect(port: int) -> socket.socket:
    """Return a connection to the coordinator, once it is there and has greeted."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 60)
        except OSError:
            time.sleep(0.05)
            continue
        assert connection.recv(1) == b"o"
        return connection
    raise AssertionError("node 0 listens nowhere")
