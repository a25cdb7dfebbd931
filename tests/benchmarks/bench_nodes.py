"""Launch on two nodes, two processes each, from two network namespaces that a cable joins: one gather.

With one process on each node Accelerate would start two runs of one rank.
Needs root and the program ip; without them it measures nothing and says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 5
ADDRESSES = ("10.214.0.1", "10.214.0.2")


def run() -> list[Row]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("bench_nodes needs root and ip (apt package iproute2)", file=sys.stderr)
        return []
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(two_namespaces())
        contenders = {
            name: stack.enter_context(BothNodes(f"bench_nodes:{maker}", names))
            for name, maker in {"ours": "ours", "accelerate": "accelerate"}.items()
        }
        seconds = interleave(contenders, rounds=ROUNDS, warmup=1)
    return compare("launch of 2 nodes x 2 processes, one gather", seconds, {"accelerate": 1.0})


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Make two namespaces with an interface each, which are the ends of one cable."""
    names = [f"nab{os.getpid()}n{node}" for node in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class BothNodes:
    """A contender in each namespace; a round is one of both at once, its time the longer one."""

    def __init__(self, target: str, names: list[str]) -> None:
        self._nodes = [
            Contender(f"{target}_{node}", prefix=["ip", "netns", "exec", name])
            for node, name in enumerate(names)
        ]

    def __call__(self) -> float:
        seconds = [0.0, 0.0]

        def one(node: int) -> None:
            seconds[node] = self._nodes[node]()

        threads = [threading.Thread(target=one, args=(node,)) for node in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(seconds), "a node failed, what it wrote says why"
        return max(seconds)

    def __enter__(self) -> BothNodes:
        return self

    def __exit__(self, *error: Any) -> None:
        for node in self._nodes:
            node.__exit__(*error)


def launches(library: Any, node: int, first_port: int) -> Callable[[], float]:
    """Return a round: a launch on a port of its own, which both nodes count alike."""
    ports = itertools.count(first_port)

    def work() -> None:
        import torch

        accelerator = library.Accelerator()
        everyone = accelerator.gather(torch.tensor([accelerator.process_index]))
        assert everyone.tolist() == [0, 1, 2, 3]

    def one_round() -> float:
        place = {"num_nodes": 2, "node_rank": node, "master_addr": ADDRESSES[0], "use_port": str(next(ports))}
        started = time.perf_counter()
        library.notebook_launcher(work, num_processes=2, **place)
        return time.perf_counter() - started

    return one_round


def ours_0() -> Callable[[], float]:
    import notebook_accel

    return launches(notebook_accel, 0, 29700)


def ours_1() -> Callable[[], float]:
    import notebook_accel

    return launches(notebook_accel, 1, 29700)


def accelerate_0() -> Callable[[], float]:
    import accelerate

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # it would take the loopback interface
    return launches(accelerate, 0, 29800)


def accelerate_1() -> Callable[[], float]:
    import accelerate

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    return launches(accelerate, 1, 29800)
