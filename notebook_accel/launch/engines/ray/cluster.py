"""The Ray cluster of a launch: connecting to it, what it has, and how many workers that is enough for."""

from __future__ import annotations

import logging
import math
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .... import environ, interrupts, runtime
from ....errors import LaunchError
from ... import leftovers

PLACEMENTS: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_NAMESPACE: Final = "notebook_accel at "
"""What Ray calls connections of ours, before their address: it is how they are told from the user's own."""
_LOCAL: Final = "local"
_SLOW_SERVER: Final = (
    "Proxy failed to Connect to backend",
    "Starting Ray client server failed",
    "psutil.ZombieProcess",
)
"""What Ray's client says where the process that is to serve it was too slow, or ended as it started."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_SHOWN_NODES: Final = 6
_MANY: Final = 1 << 20
_SOCKET: Final = len("/ray/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store.1")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node.

    Attributes:
        name: Ray's name of it.
        address: its IP address.
        resources: what it has in all, used or free, by Ray's names.
    """

    name: str
    address: str
    resources: Mapping[str, float]


def connect(address: str | None) -> None:
    """Connect this process to Ray, unless it is connected already; the connection stays for later launches.

    Args:
        address: of the cluster. None is the present connection, else the cluster that RAY_ADDRESS names, else a Ray
            that starts on this machine.

    Raises:
        LaunchError: there is no Ray at the address, or this process is connected elsewhere.
    """
    import ray

    if ray.is_initialized():
        if address is None or _is_connected_to(address):
            return
        ray.shutdown()
    elif ray.util.client.num_connected_contexts():
        ray.util.client.ray.disconnect()  # from a cluster that is gone
    asked = address or environ.get("RAY_ADDRESS") or _LOCAL
    try:
        _init(asked)
    except Exception as error:  # each way of connecting has its own kinds
        why = find_telling_line(str(error)) or type(error).__name__
        if asked == _LOCAL:
            raise LaunchError(f"Ray cannot be started on this machine ({why})") from error
        name = "address" if address else "RAY_ADDRESS"
        raise LaunchError(
            f"{name}={asked!r}: no Ray cluster answers there ({why}); 'auto' is the cluster that this machine belongs "
            "to, 'ray://host:10001' one elsewhere, and without address= Ray starts on this machine"
        ) from error


def _init(address: str, tries: int = 2) -> None:
    """Connect; try again where Ray was only too slow to start, as on a busy machine.

    Ray gives itself half a minute, to start here as well as to start the process that serves a client.
    """
    import ray

    options: dict[str, Any] = {}
    if address == _LOCAL:
        options["include_dashboard"] = False
        if environ.get("RAY_TMPDIR") is None:
            parent = leftovers.find_folder(_SOCKET)
            if parent != tempfile.gettempdir():
                options["_temp_dir"] = f"{parent}/ray"
    try:
        with interrupts.allow_interrupt():  # it may take long
            ray.init(
                address=address,
                namespace=_NAMESPACE + address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
    except Exception as error:
        ray.shutdown()
        was_slow = any(words in str(error) for words in _SLOW_SERVER) or (
            address == _LOCAL and "timed out" in str(error)
        )
        if not was_slow or tries < 2:
            raise
        _init(address, tries - 1)


def _is_connected_to(address: str) -> bool:
    """Return whether this process is connected to an address; LaunchError where another connection is in use."""
    import ray

    context = ray.get_runtime_context()
    space = str(context.namespace)
    if not space.startswith(_NAMESPACE):
        if address == "auto" or (not is_client() and context.gcs_address == address):
            return True
        raise LaunchError(
            f"address={address!r}: this process is connected to a Ray cluster already; leave address= out to launch "
            "there, or call ray.shutdown() first"
        )
    present = space.removeprefix(_NAMESPACE)
    if present == address:
        return True
    sessions = [found for each in runtime.sessions() if (found := each()) is not None]
    users = [each for each in (*runtime.runs(), *sessions) if not each.is_over and each.job.engine == "ray"]
    if users:
        raise LaunchError(
            f"address={address!r}: {users[0]!r} uses the Ray at {present!r} still; wait, or stop it"
        )
    return False


def is_client() -> bool:
    """Return whether this process is connected through Ray's client, so that it is no part of the cluster."""
    import ray

    return bool(ray.util.client.ray.is_connected())


def is_up() -> bool:
    """Return whether this process is connected; if it is not, a call of Ray would connect it."""
    import ray

    return bool(ray.is_initialized())


def find_own_address() -> str:
    """Return the address at which the cluster's nodes find this process."""
    import ray

    if not is_client():
        return str(ray.util.get_node_ip_address())
    asked = str(ray.get_runtime_context().namespace).removeprefix(_NAMESPACE)
    host = asked.removeprefix("ray://").rpartition(":")[0].strip("[]")
    family, _, _, _, where = socket.getaddrinfo(host or "8.8.8.8", 10001, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing: the system says which way it would go
        return str(probe.getsockname()[0])


def list_nodes() -> list[Node]:
    """Return the living nodes; LaunchError where the cluster is gone."""
    import ray

    try:
        entries = ray.nodes()
    except ConnectionError as error:
        raise LaunchError(f"Ray does not answer any more ({find_telling_line(str(error))})") from error
    return [
        Node(name=entry["NodeID"], address=entry["NodeManagerAddress"], resources=entry["Resources"])
        for entry in entries
        if entry["Alive"]
    ]


def choose_resources(
    nodes: Sequence[Node], use_cpu: bool, asked: Mapping[str, float] | None
) -> dict[str, float]:
    """Return what each worker gets.

    Args:
        nodes: the cluster's.
        use_cpu: whether to leave GPUs alone.
        asked: what the user asks for; None is a CPU, and a GPU where the cluster has any.

    Returns:
        Amounts by Ray's names.
    """
    if asked is not None:
        return dict(asked)
    has_gpus = any(node.resources.get("GPU", 0) for node in nodes)
    return {"CPU": 1, "GPU": 1} if has_gpus and not use_cpu else {"CPU": 1}


def count_room(nodes: Sequence[Node], resources: Mapping[str, float], placement: str) -> int:
    """Return how many workers the nodes have room for, if nobody else uses them.

    Args:
        nodes: the cluster's.
        resources: what each worker gets, by Ray's names.
        placement: one of `PLACEMENTS`.
    """
    counts = [_count_fitting(node, resources) for node in nodes]
    if placement == "STRICT_PACK":
        return max(counts, default=0)
    if placement == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return sum(counts)


def _count_fitting(node: Node, resources: Mapping[str, float]) -> int:
    parts = [node.resources.get(name, 0) / amount for name, amount in resources.items() if amount > 0]
    return math.floor(min(parts) + 1e-6) if parts else _MANY


def format_resources(resources: Mapping[str, float]) -> str:
    """Return resources as text: `1 CPU, 2 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def format_nodes(nodes: Sequence[Node], resources: Mapping[str, float]) -> str:
    """Return as text what each node has of the resources that a worker needs."""
    texts = [
        f"{node.address} has {format_resources({name: node.resources.get(name, 0) for name in resources})}"
        for node in nodes
    ]
    more = f" and {len(texts) - _SHOWN_NODES} others" if len(texts) > _SHOWN_NODES else ""
    return "; ".join(texts[:_SHOWN_NODES]) + more if texts else "no node is alive"


def describe_free() -> str:
    """Return as text the CPUs and GPUs that nobody uses now."""
    import ray

    free = ray.available_resources()
    return format_resources(
        {name: free.get(name, 0) for name in ("CPU", "GPU") if name == "CPU" or name in free}
    )


def find_telling_line(text: str) -> str:
    """Return the line of an error's text that says most: the last one of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1 if _TRACEBACK in text else 0][:300] if lines else ""
