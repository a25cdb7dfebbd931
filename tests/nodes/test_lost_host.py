"""The node that holds the run together is killed: what the cell of another one says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel
from tests.ports import reserve_port

pytestmark = [pytest.mark.notebook, pytest.mark.slow]

CELL = """
import os, socket, time
import torch, torch.distributed as dist
from notebook_accel import notebook_launcher

def train(stage):
    is_other = os.environ["RANK"] != "0"
    if stage == "meets" and is_other:
        print("go", flush=True)
    elif stage == "meets":
        time.sleep(3600)
    dist.init_process_group("gloo")
    dist.barrier()
    if is_other:
        print("go", flush=True)
    if stage == "waits":
        time.sleep(3600)
    while True:
        dist.barrier()

def launch(node, stage, **place):
    notebook_launcher(train, args=(stage,), num_processes=1, node_rank=node, **place)
"""
WAIT = """
while True:
    try:
        socket.create_connection(("127.0.0.1", PORT)).close()
        break
    except OSError:
        time.sleep(0.05)
"""
PLACES = {
    "comes and goes": "num_nodes='2:2', rdzv_endpoint='127.0.0.1:{port}', rdzv_conf={{'keep_alive_interval': 10}}",
    "static": "num_nodes=2, master_addr='127.0.0.1', use_port={port}",
    "c10d": "num_nodes=2, rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:{port}', rdzv_id='one'",
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that is the second node."""
    started = Kernel(tmp_path_factory.mktemp("kernel"))
    started.run(CELL).ok()
    yield started
    started.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel that is the first node, to be killed."""
    started = Kernel(tmp_path, is_copy=True)
    started.run(CELL).ok()
    yield started
    started.close()


@pytest.mark.parametrize("stage", ["waits", "works", "meets"])
@pytest.mark.parametrize("place", PLACES)
def test_a_sentence_names_the_node_and_no_frames_of_torch_are_shown(
    kernel: Kernel, host: Kernel, place: str, stage: str
) -> None:
    with reserve_port() as port:
        where = PLACES[place].format(port=port)
        host.client.execute(f"launch(0, {stage!r}, {where})")
        kernel.run(WAIT.replace("PORT", str(port))).ok()  # so that the other one holds the store
        cell = kernel.run(f"launch(1, {stage!r}, {where})", during=host.kill)
    kind, text = cell.error or ("", cell.stdout)
    assert kind in ("LaunchError", "WorkerError"), text
    assert (
        text.startswith("node 0 (") and f" at 127.0.0.1:{port}, which holds the run together, is gone" in text
    )
    assert "run the cell again on all nodes" in text
    shown = cell.stdout + cell.told
    assert "frame #" not in shown and "Exception raised from" not in shown, shown
    if stage != "meets":  # there a line of torch is the rank's
        assert "TCPStore" not in shown, shown
