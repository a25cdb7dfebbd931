"""Nodes that are network namespaces of this machine, joined by a bridge, with a Jupyter kernel in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.nodes.slow_wire import SlowWire
from tests.notebooks.kernel import Cell, Kernel, make_event_loop

IMPORTS = """
import os, sys, time, signal, torch
import torch.distributed as dist
from notebook_accel import notebook_launcher
torch.set_num_threads(1)
"""
LAUNCH = """
def launch(function, **more):
    place = dict(num_processes=1, num_nodes=2, node_rank=node, master_addr=master, use_port=port)
    return notebook_launcher(function, **{**place, **more})

def total():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)
"""


def ip(*arguments: str) -> str:
    """Run `ip`; CalledProcessError with what it said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
    return done.stdout


@dataclass
class Network:
    """Namespaces with an interface each, `eth0`, on one bridge in another namespace of its own."""

    names: list[str]
    bridge: str
    addresses: list[str] = field(default_factory=list)

    def make(self) -> None:
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "br0", "up")
        for node, name in enumerate(self.names):
            ip("netns", "add", name)
            port = f"port{node}"
            ip("-n", self.bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.bridge, "link", "set", port, "master", "br0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            self.addresses.append(f"10.213.0.{node + 1}")
            ip("-n", name, "address", "add", f"{self.addresses[-1]}/24", "dev", "eth0")

    def remove(self) -> None:
        there = {line.split()[0] for line in ip("netns", "list").splitlines()}
        for name in (*self.names, self.bridge):
            if name in there:
                ip("netns", "del", name)

    def cut(self, node: int, *, up: bool) -> None:
        """Take a node's cable out of the bridge, or put it in again."""
        ip("-n", self.bridge, "link", "set", f"port{node}", "up" if up else "down")

    def take_out(self, node: int) -> None:
        """Let all packets of a node be lost on their way; its interface stays up."""
        ip("-n", self.bridge, "link", "set", f"port{node}", "nomaster")

    def put_in(self, node: int) -> None:
        """End what `take_out` began."""
        ip("-n", self.bridge, "link", "set", f"port{node}", "master", "br0")

    @contextmanager
    def slow(self, node: int, delay: float, loss: float) -> Iterator[SlowWire]:
        """Give a node another cable meanwhile, that delays all that it carries and loses some."""
        name, address = self.names[node], f"{self.addresses[node]}/24"
        wire = SlowWire((f"{name}s", f"{name}b"), delay, loss)
        ip("link", "set", wire.names[0], "netns", name)
        ip("link", "set", wire.names[1], "netns", self.bridge)
        ip("-n", self.bridge, "link", "set", wire.names[1], "master", "br0", "up")
        ip("-n", name, "address", "del", address, "dev", "eth0")
        try:
            ip("-n", name, "link", "set", wire.names[0], "up")
            ip("-n", name, "address", "add", address, "dev", wire.names[0])
            yield wire
        finally:
            wire.close()
            ip("-n", name, "address", "add", address, "dev", "eth0")


class Nodes:
    """A kernel on each node; a cell runs on all of them at once, with its node's number in `node`.

    Attributes:
        network: what joins them.
        kernels: by node.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self._folder = folder
        self._port = 29600
        self.kernels: dict[int, Kernel] = {}

    @property
    def port(self) -> int:
        """The port of the last run."""
        return self._port

    def start(self, count: int) -> None:
        """Start the kernels."""
        self._at_once([(self._start_one, node) for node in range(count)])

    def _start_one(self, node: int) -> None:
        make_event_loop()
        folder = self._folder / f"node{node}"
        folder.mkdir(exist_ok=True)
        kernel = Kernel(folder, prefix=["ip", "netns", "exec", self.network.names[node]], transport="ipc")
        kernel.run(f"{IMPORTS}\n{LAUNCH}\nnode, master = {node}, {self.network.addresses[0]!r}").ok()
        self.kernels[node] = kernel

    def run(self, code: str, count: int = 2, during: Callable[[], None] | None = None) -> list[Cell]:
        """Run a cell on the first nodes, all at once, each run with a port of its own in `port`.

        `during` is called as soon as the cell of the first one prints `go`.
        """
        return self.run_each([code] * count, during)

    def run_each(
        self, codes: Sequence[str], during: Callable[[], None] | None = None, at: str = "go"
    ) -> list[Cell]:
        """Run a cell on each node; an empty one leaves its node out. `during` and `at` are those of the first one."""
        self._port += 1
        cells: dict[int, Cell] = {}
        first = next(node for node, code in enumerate(codes) if code)

        def run_one(node: int) -> None:
            make_event_loop()
            code = f"port = {self._port}\n{textwrap.dedent(codes[node])}"
            cells[node] = self.kernels[node].run(code, 100, during if node == first else None, at)

        self._at_once([(run_one, node) for node, code in enumerate(codes) if code])
        return [cells[node] for node in sorted(cells)]

    def forget(self, node: int) -> None:
        """Close a node's kernel."""
        self.kernels.pop(node).close()

    def close(self) -> None:
        for node in list(self.kernels):
            self.forget(node)

    def _at_once(self, calls: Sequence[tuple[Any, int]]) -> None:
        errors: list[BaseException] = []

        def call(function: Any, node: int) -> None:
            try:
                function(node)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=each) for each in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def why_not() -> str:
    """Return why there can be no namespaces here; empty where there can."""
    if shutil.which("ip") is None:
        return "needs the program ip (apt package iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = f"na{os.getpid()}probe"
    try:
        ip("netns", "add", probe)
        ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return ""
