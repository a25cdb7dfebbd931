"""The engines that the contract is tried on, and how each is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from notebook_accel.launch.engines import base
from notebook_accel.launch.engines.base import Engine
from notebook_accel.launch.engines.command import CommandEngine
from tests.nodes import network, slurm_cluster, ssh_hosts
from tests.nodes.network import Network
from tests.notebooks.kernel import Kernel


class Place(Protocol):
    """What an engine starts ranks on, with a notebook's machine."""

    def start_kernel(self, folder: Path) -> Kernel:
        """Start a kernel on the notebook's machine."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One engine in one form.

    Attributes:
        engine: its name; where it has none by which it is found, a name of the kernel's.
        kind: its class, where it has none.
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
    kind: type[Engine] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prepare: str = ""
    needs: str = "torch"
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 240.0
    place: Callable[[Path], AbstractContextManager[Place]] | None = None
    obstacle: Callable[[], str] = str
    keeps: Mapping[str, str] = field(default_factory=dict)

    def find(self) -> Engine:
        """Return the engine, to be asked what it has."""
        return base.find(self.engine) if self.kind is None else self.kind.__new__(self.kind)

    @property
    def ranks(self) -> int:
        """Return how many ranks its launches have."""
        return int(self.arguments.get("num_processes", 1))


@dataclass(frozen=True)
class Namespaces:
    """Namespaces of this machine, which stand for containers."""

    network: Network

    def start_kernel(self, folder: Path) -> Kernel:
        """Start a kernel outside of them."""
        return Kernel(folder, HOSTS=" ".join(self.network.names))


@contextmanager
def make_namespaces(folder: Path) -> Iterator[Namespaces]:
    network = Network([f"ns{os.getpid()}c{node}" for node in range(2)], f"ns{os.getpid()}cb")
    try:
        network.make()
        yield Namespaces(network)
    finally:
        network.remove()


ENGINES: Mapping[str, Tried] = {
    "command": Tried(
        engine="place",
        kind=CommandEngine,
        arguments={"num_processes": 2},
        prepare="""
from notebook_accel.launch.engines.command import CommandEngine
place = CommandEngine(["ip", "netns", "exec", "{host}", "sh", "-c", "{script}"], os.environ["HOSTS"].split())
""",
        place=make_namespaces,
        obstacle=network.why_not,
        keeps=ssh_hosts.KEEPS,
    ),
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
