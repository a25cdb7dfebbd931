"""Resolves which nodes take part in a run and where they meet, and checks that these arguments fit together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...config.argument_checks import parse_port
from ...trust.secret import Trust, find_secret
from ..job import Rendezvous
from .addresses import find_host_problem, find_listen_problem, find_public_address

SETTINGS = ("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt")
"""The keys of `rdzv_conf` that a run has whose nodes may join and leave; those of its keep-alive have no effect."""


def resolve(options: Mapping[str, Any], wrong: Collection[str]) -> tuple[Rendezvous, list[Exception]]:
    """Return where the nodes meet, and which of these arguments contradict each other.

    Args:
        options: all arguments of `notebook_launcher` by name.
        wrong: names of arguments that are wrong by themselves. Their defaults are used.

    Returns:
        The rendezvous, and a ValueError for each contradiction.
    """
    problems: list[Exception] = []
    text = "1" if "num_nodes" in wrong else str(options["num_nodes"])
    least, _, most = text.rpartition(":")
    place = Rendezvous(
        address=Rendezvous.address if "master_addr" in wrong else options["master_addr"],
        port=parse_port(options["use_port"]) or 0,
        node_rank=0 if "node_rank" in wrong else int(options["node_rank"]),
        num_nodes=int(most),
        min_nodes=int(least or 0),
        backend=Rendezvous.backend if "rdzv_backend" in wrong else options["rdzv_backend"],
        endpoint="" if "rdzv_endpoint" in wrong else options["rdzv_endpoint"],
        run_id=options["rdzv_id"],
        settings=None if "rdzv_conf" in wrong else options["rdzv_conf"],
        trust=Trust(None if "secret" in wrong else _find_secret(problems, options["secret"])),
    )
    if place.is_elastic:
        _check_range(problems, place)
    if place.node_rank >= place.num_nodes and "num_nodes" not in wrong:
        meaning = ", where 0 is the node that holds the store" if place.is_elastic else ""
        text = f"choose from 0 to {place.num_nodes - 1}{meaning}"
        problems.append(
            ValueError(f"node_rank={place.node_rank} with num_nodes={format_count(place)}: {text}")
        )
    if "use_port" not in wrong and "num_nodes" not in wrong:
        _check_port(problems, place, options["use_port"])
    _check_address(problems, place)
    _check_endpoint(problems, place.endpoint)
    return place, problems


def _find_secret(problems: list[Exception], given: Any) -> str | None:
    try:
        return find_secret(given)
    except ValueError as error:
        problems.append(error)
        return None


def find_exposure(place: Rendezvous) -> str:
    """Return a sentence about a place that strangers may reach, empty where only the machines of a network can.

    Args:
        place: where several nodes meet.
    """
    host = place.endpoint.rpartition(":")[0].strip("[]") if place.endpoint else place.address
    if not (address := find_public_address(host)):
        return ""
    name = "rdzv_endpoint" if place.endpoint else "master_addr"
    return (
        f"{name}={host!r} is a public address ({address}): torch's store, gloo and NCCL let everybody in who reaches "
        "their ports. Use an address of a private network or VPN, or let a firewall admit the nodes alone"
    )


def format_count(place: Rendezvous) -> str:
    """Return the number of nodes as the user writes it: `2` or `'1:4'`.

    Args:
        place: has the number of nodes.
    """
    return repr(f"{place.min_nodes}:{place.num_nodes}") if place.is_elastic else str(place.num_nodes)


def _check_range(problems: list[Exception], place: Rendezvous) -> None:
    """Check what matters only if nodes may join and leave."""
    number = f"num_nodes={format_count(place)}"
    if place.backend == "static":
        text = (
            f"{number} with rdzv_backend='static': nodes join and leave under 'c10d', leave rdzv_backend out"
        )
        problems.append(ValueError(text))
    if not place.run_id:
        problems.append(ValueError(f"rdzv_id='' with {number}: give the run a name, or leave rdzv_id out"))
    unknown_keys = sorted(set(place.settings or {}) - set(SETTINGS))
    if unknown_keys:
        text = (
            f"rdzv_conf={place.settings!r} with {number}: {unknown_keys[0]} is none of {', '.join(SETTINGS)}"
        )
        problems.append(ValueError(text))


def _check_port(problems: list[Exception], place: Rendezvous, use_port: Any) -> None:
    """Check that the nodes can meet at a port; `use_port` is what the user wrote."""
    several = place.num_nodes > 1
    if place.port == 0 and (several or place.is_elastic) and not place.endpoint:
        number = f"num_nodes={format_count(place)}"
        text = f"use_port={use_port!r} with {number}: the nodes must agree on a port, name one"
        problems.append(ValueError(text))
    elif place.port and _opens_port(place) and (reason := find_listen_problem("", place.port)):
        step = "name another one on all nodes" if several else "leave use_port out and a free one is used"
        problems.append(ValueError(f"use_port={use_port!r}: the port cannot be opened ({reason}); {step}"))


def _check_address(problems: list[Exception], place: Rendezvous) -> None:
    if place.num_nodes == 1 and (reason := find_listen_problem(place.address, 0)):
        text = (
            f"master_addr={place.address!r} is not an address of this machine ({reason}); "
            "leave master_addr out for a run on one node"
        )
        problems.append(ValueError(text))
    if place.num_nodes > 1 and not place.endpoint and (reason := find_host_problem(place.address)):
        text = f"master_addr={place.address!r}: this machine finds no such host ({reason})"
        problems.append(ValueError(text))


def _check_endpoint(problems: list[Exception], endpoint: str) -> None:
    if not endpoint:
        return
    host, _, digits = endpoint.rpartition(":")
    if not host or not digits.isdecimal() or not parse_port(digits):
        text = f"rdzv_endpoint={endpoint!r}: host:port is needed, a port from 1 to 65535"
        problems.append(ValueError(text))
    elif reason := find_host_problem(host.strip("[]")):
        text = f"rdzv_endpoint={endpoint!r}: this machine finds no such host ({reason})"
        problems.append(ValueError(text))


def _opens_port(place: Rendezvous) -> bool:
    """Return whether this node is the one that opens the port. With c10d another one of this machine may be it."""
    return place.num_nodes == 1 or (place.backend == "static" and place.node_rank == 0)
