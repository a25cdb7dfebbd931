"""The engines that the contract is tried on, and how each is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.nodes import slurm_cluster, ssh_hosts
from tests.notebooks.kernel import Kernel


class Place(Protocol):
    """What an engine starts ranks on, with a notebook's machine."""

    def start_kernel(self, folder: Path) -> Kernel:
        """Start a kernel on the notebook's machine."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One engine in one form.

    Attributes:
        engine: its name.
        arguments: of each launch.
        prepare: a cell that runs before the first launch.
        needs: module without which it cannot be tried.
        environment: variables of the kernel.
        patience: seconds that a launch may take.
        place: makes what the engine starts ranks on, in a folder of its own, where that is not this machine.
        obstacle: returns why that cannot be made; empty where it can.
        keeps: what stays from one launch to the next, as `tests/guards.py` names it, with the reason.
    """

    engine: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prepare: str = ""
    needs: str = "torch"
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 240.0
    place: Callable[[Path], AbstractContextManager[Place]] | None = None
    obstacle: Callable[[], str] = str
    keeps: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Return how many ranks its launches have."""
        return int(self.arguments.get("num_processes", 1))


ENGINES: Mapping[str, Tried] = {
    "inprocess": Tried(engine="inprocess"),
    **{
        method: Tried(engine="local", arguments={"num_processes": 2, "start_method": method})
        for method in ("fork", "fresh")
    },
    "ray": Tried(
        engine="ray",
        arguments={"num_processes": 2},
        prepare="""
from notebook_accel.launch.engines.ray import cluster
from tests.patient_ray import be_patient
be_patient()
cluster.connect(None)
""",
        needs="ray",
        keeps={"children": "Ray's own processes", "shared_memory": "Ray's object store"},
    ),
    "slurm": Tried(
        engine="slurm",
        arguments={"num_processes": 2, "num_nodes": 2},
        needs="submitit",
        place=slurm_cluster.make_cluster,
        obstacle=slurm_cluster.why_no_cluster,
        keeps=slurm_cluster.KEEPS,
    ),
    "ssh": Tried(
        engine="ssh",
        arguments={"num_processes": 2, "hosts": ["node1", "node2"]},
        place=ssh_hosts.make_hosts,
        obstacle=ssh_hosts.why_no_hosts,
        keeps=ssh_hosts.KEEPS,
    ),
    "xla": Tried(
        engine="xla",
        needs="torch_xla",
        environment={"PJRT_DEVICE": "CPU"},
        prepare="import torch_xla",
    ),
}
