"""Nodes that join, leave and are lost while a run goes on; each node is a kernel or a script of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel
from tests.ports import reserve_port

pytestmark = [pytest.mark.notebook, pytest.mark.slow]

HEAD = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from notebook_accel import notebook_launcher

def launch(**more):
    return notebook_launcher(train, num_processes=2, returns="all", **more)

def train():
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("world", int(ones), flush=True)
    while True:
        end = torch.tensor(float(os.path.exists(FOLDER + "/end")))
        dist.all_reduce(end)
        if end:
            return dist.get_rank(), dist.get_world_size()
        time.sleep(0.05)
"""
WAIT = """
seen = 0

def wait_for(*texts, seconds=100):
    end = time.monotonic() + seconds
    while not all(text in shown() for text in texts) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(text in shown() for text in texts), shown()

def shown():
    events = run.record.since(seen)
    return "\\n".join(str(getattr(event, "text", getattr(event, "detail", ""))) for event in events)
"""


@pytest.fixture
def place() -> Iterator[str]:
    """Where the nodes of a test meet, as arguments of a launch."""
    with reserve_port() as port:
        yield f"rdzv_endpoint='127.0.0.1:{port}'"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Kernel]]:
    """Two kernels that are to be nodes; the last test kills the second one."""
    started = [Kernel(tmp_path_factory.mktemp("kernel")) for _ in range(2)]
    for kernel in started:
        kernel.run(HEAD + WAIT).ok()
    yield started
    for kernel in started:
        kernel.close()


def test_a_node_that_leaves_and_too_few_that_stay(kernels: list[Kernel], place: str, tmp_path: Path) -> None:
    """All nodes run the very same cell: which one holds the store they find out."""
    first, second = kernels
    patience = {"join_timeout": 20, "keep_alive_interval": 10}  # no node is late, and none is lost
    cell = f"run = launch(num_nodes='2:3', {place}, rdzv_conf={patience}, block=False)"
    for node in kernels:
        node.run(f"FOLDER = {str(tmp_path)!r}; {cell}").ok()
    second.run("wait_for('world 4'); run.stop(); print(run.status)").ok()
    first.run(
        "wait_for('world 4', '1 node left, at least 2 are needed: waiting for others, 20 s at most')"
    ).ok()
    kind, text = first.run("run.result()").error or ("", "")
    assert kind == "LaunchError"
    assert text == (
        "fewer than 2 nodes were there after 20 s, num_nodes='2:3' asks for as many; "
        "rdzv_conf={'join_timeout': seconds} sets how long to wait"
    )


def test_workers_that_ended_well_start_again_for_another_node(kernels: list[Kernel], place: str) -> None:
    """Values count once all nodes have theirs."""
    code = f"""
    def ends():
        dist.init_process_group("gloo")
        dist.barrier()
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if not attempt and dist.get_rank() == 3:
            time.sleep(1.0)
            raise ValueError("late")
        return dist.get_rank(), attempt
    place = dict(num_nodes="2:2", {place}, rdzv_conf={{"keep_alive_interval": 10}})  # no node is lost
    run = notebook_launcher(ends, num_processes=2, returns="all", max_restarts=1, block=False, **place)
    """
    for node in kernels:
        node.run(code).ok()
    ends = [node.run("print(run.result(100), run.record.restarts)").ok().lines[-1] for node in kernels]
    assert sorted(ends) == ["[(0, 1), (1, 1)] 1", "[(2, 1), (3, 1)] 1"]


def test_a_hang_is_one_of_all_nodes(kernels: list[Kernel], place: str) -> None:
    """While a rank of one node prints, those of the other wait longer than the limit; then all are shown on both."""
    code = f"""
    from unittest import mock
    from notebook_accel.launch.engines.nodes import coordinator, meeting
    from notebook_accel.launch.supervise import hang_watch
    def hangs():
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 3:
            for _ in range(56):
                time.sleep(0.4)
                print("works", flush=True)
            time.sleep(600)
        dist.barrier()
    patient = [mock.patch.object(hang_watch, "_ANSWER_SECONDS", 60.0),
               mock.patch.object(coordinator, "_SETTLE_SECONDS", 60.0),
               mock.patch.object(meeting, "_VERDICT_SECONDS", 60.0)]  # a busy machine answers late
    for each in patient:
        each.start()
    place = dict(num_nodes="2:2", {place}, rdzv_conf={{"keep_alive_interval": 10}})  # no node is lost
    run = notebook_launcher(hangs, num_processes=2, hang_timeout=20, on_hang="raise", block=False, **place)
    """
    for node in kernels:
        node.run(code).ok()
    ends = [
        node.run(
            "run.wait()\nfor each in patient: each.stop()\nprint(run.lines().count('works'))\nrun.result()"
        )
        for node in kernels
    ]
    assert sorted(end.lines[-1] for end in ends) == ["0", "56"]
    for end in ends:
        kind, text = end.error or ("", end.stdout)
        assert kind == "HangError" and "in barrier" in text and "time.sleep(600)" in text, text
        assert "node 0 (" in text and "node 1 (" in text
        assert all(f"rank {rank}" in text for rank in range(4)), text


def test_a_stop_of_one_node_lets_all_return(kernels: list[Kernel], place: str) -> None:
    """Each rank asks as it likes meanwhile, and reads the same answer at the same question."""
    code = f"""
    from notebook_accel import Accelerator
    def asks():
        accelerator, questions = Accelerator(cpu=True), 2
        assert not accelerator.should_stop
        accelerator.wait_for_everyone()  # a rank that has never asked would be ended at once
        print("asks", flush=True)
        while not accelerator.should_stop:
            questions += 1
            time.sleep(0.01 * (1 + accelerator.process_index % 2))
        return questions
    place = dict(num_nodes="2:2", {place}, rdzv_conf={{"keep_alive_interval": 10}})  # no node is lost
    run = notebook_launcher(asks, num_processes=2, returns="all", block=False, **place)
    """
    for node in kernels:
        node.run(code).ok()
    wait = "while run.lines().count('asks') < 2:\n    time.sleep(0.01)\n"
    for node in kernels:
        node.run(wait).ok()
    stopped = kernels[1].run("run.stop(); print(run.result(), run.status)").ok().lines[-1]
    other = kernels[0].run("print(run.result(), run.status)").ok().lines[-1]
    (values, status), (others, ended) = (line.rsplit(" ", 1) for line in (stopped, other))
    assert (status, ended) == ("stopped", "done") and values == others
    assert len(set(values.strip("[]").split(", "))) == 1


def test_nodes_join_and_are_lost(kernels: list[Kernel], place: str, tmp_path: Path) -> None:
    """Joined while it runs; then a worker is killed, and then a whole kernel."""
    first, second = kernels
    beats = "rdzv_conf={'keep_alive_interval': 6}"  # one that only stands still is not lost
    start = f"run = launch(num_nodes='1:3', {place}, {beats}, max_restarts=1, block=False, node_rank=%d)\n"
    for kernel in kernels:
        kernel.run(f"FOLDER = {str(tmp_path)!r}; seen = 0").ok()
    again = "workers start again"
    first.run(start % 0 + "wait_for('world 2')").ok()
    second.run(start % 1 + "wait_for('world 4')").ok()
    first.run(f"wait_for('node joined: 2 nodes, 4 ranks; {again}', 'world 4'); seen = run.record.end").ok()

    kill = "seen = run.record.end; os.kill(run.record.phases[3].pid, 9)\n"
    second.run(kill + "wait_for('SIGKILL', 'restart 1 of 1', 'world 4')").ok()
    first.run("wait_for('node 1 (', 'SIGKILL', 'restart 1 of 1', 'world 4'); seen = run.record.end").ok()

    second.kill()  # collectives and stores give up after minutes
    first.run(f"wait_for('node lost: 1 node, 2 ranks; {again}', 'world 2')").ok()
    (tmp_path / "end").touch()
    ended = first.run("print(run.result(), run.status, run.record.restarts, sorted(run.record.phases))").ok()
    assert ended.lines[-1] == "[(0, 2), (1, 2)] done 3 [0, 1]"
