"""The tutorials for several machines, on several: nodes with a kernel each, hosts by ssh, a SLURM cluster."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.nodes import slurm_cluster, ssh_hosts
from tests.nodes.network import Nodes
from tests.notebooks.kernel import Kernel

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in ssh_hosts.KEEPS.items()],
]


def cells_of(name: str) -> list[str]:
    pytest.importorskip("sklearn", reason="needs the extra `tutorial`")
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    return [cell.source for cell in code if "install" not in cell.metadata.get("tags", [])]


def test_the_tutorial_runs_on_two_nodes(nodes: Nodes) -> None:
    cells = cells_of("07_many_nodes.ipynb")
    for node in range(2):
        place = {"NODE": str(node), "MASTER": nodes.network.addresses[0], "PORT": "29555"}
        nodes.kernels[node].run(f"import os\nos.environ |= {place!r}").ok()
    for cell in cells:
        done = [each.ok() for each in nodes.run(cell)]
    said = [each.stdout.splitlines()[-1] for each in done]
    assert said[0] == said[1] and said[0].startswith("Test accuracy: 9")


def run_cluster_tutorial(kernel: Kernel, cluster: str) -> str:
    """Run it in a kernel, and return what was printed, by the ranks too."""
    cells = cells_of("11_cluster.ipynb")
    try:
        kernel.run(
            f"import os\nos.environ['NOTEBOOK_ACCEL_VIEW'] = 'text'\nos.environ['CLUSTER'] = {cluster!r}"
        ).ok()
        said = [kernel.run(cell, timeout=240).ok().stdout for cell in cells]
    finally:
        kernel.close()
    assert "[0] rank 0: process" in "".join(said) and "[1] rank 1: process" in "".join(said)
    # a run in the background may still show lines of its ranks
    assert any(line.startswith("Test accuracy: 9") for line in said[-1].splitlines())
    return "".join(said)


def test_the_tutorial_for_clusters_runs_on_hosts_by_ssh(tmp_path: Path) -> None:
    if reason := ssh_hosts.why_no_hosts():
        pytest.skip(reason)
    with ssh_hosts.make_hosts(tmp_path) as hosts:
        said = run_cluster_tutorial(hosts.start_kernel(tmp_path), "node1,node2")
    assert "Launching train on 2 processes by ssh: node1 (1), node2 (1); a process stays on each host" in said


def test_the_tutorial_for_clusters_runs_by_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := slurm_cluster.why_no_cluster():
        pytest.skip(reason)
    monkeypatch.setenv("NOTEBOOK_ACCEL_STATE", str(tmp_path / "jobs"))
    with slurm_cluster.make_cluster(tmp_path) as cluster:
        said = run_cluster_tutorial(cluster.start_kernel(tmp_path), "slurm")
    assert {"rank 0 of 2 trained on n1", "rank 1 of 2 trained on n2"} <= {
        line[4:] for line in said.splitlines()
    }
    assert re.search(r"launched (\d+\.\d s|\d+ s|1 min \d+ s) ago", said), said
