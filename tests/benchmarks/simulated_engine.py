"""An engine whose hosts are simulated: what of it is not the real thing is the way to the hosts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from notebook_accel.devices import DeviceKind
from notebook_accel.launch.engines.attempts import Wait
from notebook_accel.launch.engines.remote.client import Connector, Wanted
from notebook_accel.launch.engines.remote.hosts_engine import HostsEngine
from notebook_accel.launch.engines.remote.hosts_group import Lender
from notebook_accel.launch.engines.remote.link import Link
from notebook_accel.launch.engines.remote.pool import get_pool
from notebook_accel.launch.engines.remote.transport import Transport
from notebook_accel.launch.job import Job
from tests.benchmarks.simulated_hosts import MARK, SimulatedCluster


class PipeTransport(Transport):
    """Two pipes whose other ends another process has.

    Args:
        incoming: descriptor that is read.
        outgoing: descriptor that is written to.
    """

    errors = -1

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self._code: int | None = None
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)

    @property
    def exitcode(self) -> int | None:
        """0 once the pipes have ended."""
        return self._code

    def wait(self) -> None:
        """Note the end."""
        self._code = 0

    def filenos(self) -> list[int]:
        """Return our ends."""
        return [fd for fd in (self.incoming, self.outgoing) if fd >= 0]

    def close(self) -> None:
        """Close them."""
        for fd in self.filenos():
            with contextlib.suppress(OSError):
                os.close(fd)
        self.incoming = self.outgoing = -1
        self._code = 0


@dataclass(frozen=True)
class SimulatedClient(Connector):
    """The way to simulated hosts.

    Attributes:
        cluster: simulates them.
    """

    program: ClassVar[str] = "simulation"
    connection: ClassVar[str] = "connection"
    cluster: SimulatedCluster

    def connect(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> Transport:
        """Return the way to a host, `node7` for example."""
        number = int(host.removeprefix("node"))
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        facts: dict[str, Any] = {
            "python": "{}.{}.{}".format(*sys.version_info[:3]),
            "executable": "python",
            "torch": wanted.torch,
            "notebook_accel": wanted.package,
            "address": address,
            "addresses": [address],
            "machine": host,
            "has_devices": False,
            "ready": True,
        }
        return self.cluster.connect(number, f"\n{MARK}{nonce}:{json.dumps(facts)}\n")

    def explain_failure(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Return why no agent has started, as a sentence."""
        return f"host {host}: it is not simulated"

    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return nothing: there are no errors."""
        return ""


class _Hosts(Lender):
    """The hosts of a run."""

    def __init__(self, client: SimulatedClient, names: Mapping[str, str | None]) -> None:
        self._client, self._names = client, names

    def open(self, wait: Wait) -> list[Link]:
        """Return a connection to each host."""
        return get_pool().open(self._client, self._names, Wanted.here(), lambda: wait(""))

    def find_obstacle(self, wait: Wait) -> str:
        """Return nothing."""
        return ""

    def give_back(self, *, is_stopped: bool) -> None:
        """Do nothing: the connections are in the pool."""


class SimulatedEngine(HostsEngine):
    """Starts nothing on hosts that are simulated.

    Args:
        cluster: simulates them.
        nodes: how many hosts.
        ranks: of each.
    """

    name = "simulated"
    refuses: ClassVar[Mapping[str, str]] = {}

    def __init__(self, cluster: SimulatedCluster, nodes: int, ranks: int) -> None:
        self._cluster, self._nodes, self._ranks = cluster, nodes, ranks

    def count(self, options: Mapping[str, Any], kind: DeviceKind) -> int:
        """Return how many ranks the hosts have."""
        return self._nodes * self._ranks

    def count_ranks(self, job: Job) -> list[int]:
        """Return the number of ranks of each host."""
        return [self._ranks] * self._nodes

    def make_lender(self, job: Job) -> Lender:
        """Return what has the hosts of a run."""
        names: dict[str, str | None] = {f"node{number}": None for number in range(self._nodes)}
        return _Hosts(SimulatedClient(self._cluster), names)
