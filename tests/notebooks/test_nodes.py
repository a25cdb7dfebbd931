"""A run over two nodes, here two processes of this machine that launch the same cell."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from notebook_accel import notebook_launcher

def train():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("local", os.environ["LOCAL_RANK"], "of", int(total))
    return dist.get_rank()

node, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
print(notebook_launcher(train, num_processes=2, num_nodes=2, node_rank=node, use_port=port,
                        rdzv_backend=backend, returns="all"))
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes(tmp_path: Path, backend: str) -> None:
    script = tmp_path / "cell.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    nodes = [
        subprocess.Popen(
            [sys.executable, script, str(node), port, backend], stdout=subprocess.PIPE, text=True
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=60)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(output.splitlines()[-1] for output in outputs) == ["[0, 1]", "[2, 3]"]
    for output in outputs:
        ranks = output.splitlines()[-1].strip("[]").split(", ")
        lines = sorted(line for line in output.splitlines() if line.startswith("["))
        for local, rank in enumerate(ranks):
            assert f"[{rank}] local {local} of 4" in lines
