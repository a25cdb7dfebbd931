"""What the words of `%session` ask for."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.widgets import cells


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("2 --engine slurm --num-nodes 2", {"engine": "slurm", "num_nodes": 2}),
        ("2 --engine ray --address auto", {"engine": "ray", "address": "auto"}),
        ("2 --slurm time=30", {"engine": "slurm", "slurm": {"time": "30"}}),
        ("--slurm", {"engine": "slurm", "slurm": {}}),
        ("--engine ray --slurm time=30", {"engine": "ray", "slurm": {"time": "30"}}),
        ("--hosts gpu1,gpu2:4 gpu3", {"hosts": ["gpu1", "gpu2:4", "gpu3"]}),
    ],
)
def test_the_engine_of_a_session(line: str, arguments: dict[str, Any]) -> None:
    assert cells._parse(line).arguments == arguments
