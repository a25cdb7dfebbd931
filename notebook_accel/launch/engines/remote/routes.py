"""By which addresses the hosts of a run reach each other, as the notebook chooses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...checks import addresses

_MOST_PEERS: Final = 64  # that a host is told: all hosts would be told of all


def list_needed(node: int, count: int, *, store_only: bool) -> list[int]:
    """Return the hosts to which one has to be able to connect: the first, and the next one, so that each is tried.

    Args:
        node: the host.
        count: number of hosts.
        store_only: ranks may use another network than that of the store, as NCCL does: only the first is needed.
    """
    others = [0] if store_only else [0, (node + 1) % count]
    return [other for other in dict.fromkeys(others) if other != node]


def choose_addresses(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the address of each host by which the others reach it.

    Args:
        facts: what each host says of itself.

    Returns:
        The loopback address, where there is one host or all are this machine; else the address by which
        the host is reached. Empty where that is a loopback address: the host has to be asked for one
        that the others reach.
    """
    reached = [str(fact.get("address", "")) for fact in facts]
    machines = {fact.get("machine") for fact in facts}
    if len(facts) == 1 or (len(machines) == 1 and all(map(addresses.is_loopback, reached))):
        return ["127.0.0.1"] * len(facts)
    return ["" if addresses.is_loopback(address) else address for address in reached]


def list_peers(facts: Sequence[Mapping[str, Any]], node: int) -> list[str]:
    """Return some addresses of the other hosts, the likeliest first: those by which they are reached.

    Args:
        facts: what each host says of itself.
        node: the host that needs a way to the others.
    """
    others = [fact for fact in facts if fact is not facts[node]]
    reached = [str(fact.get("address", "")) for fact in others]
    known = [address for address in reached if address and not addresses.is_loopback(address)]
    own = facts[node].get(
        "addresses", ()
    )  # such as those of a bridge of containers, which many machines have alike
    more = [str(each) for fact in others for each in fact.get("addresses", ()) if each not in own]
    return list(dict.fromkeys([*known, *more]))[:_MOST_PEERS]
