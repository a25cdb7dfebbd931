"""The tutorial for several nodes, in a kernel on each of two."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.nodes.conftest import Nodes

TUTORIAL = Path(__file__).resolve().parents[2] / "tutorials" / "07_many_nodes.ipynb"
pytestmark = [pytest.mark.notebook, pytest.mark.slow]


def test_the_tutorial_runs_on_two_nodes(nodes: Nodes) -> None:
    pytest.importorskip("sklearn", reason="needs the extra `tutorial`")
    cells = [cell.source for cell in nbformat.read(TUTORIAL, as_version=4).cells if cell.cell_type == "code"]
    for node in range(2):
        place = {"NODE": str(node), "MASTER": nodes.network.addresses[0], "PORT": "29555"}
        nodes.kernels[node].run(f"import os\nos.environ |= {place!r}").ok()
    for cell in cells:
        done = [each.ok() for each in nodes.run(cell)]
    said = [each.stdout.splitlines()[-1] for each in done]
    assert said[0] == said[1] and said[0].startswith("Test accuracy: 9")
