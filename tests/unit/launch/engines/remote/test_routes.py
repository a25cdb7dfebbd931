"""By which addresses hosts reach each other."""

from __future__ import annotations

from typing import Any

from notebook_accel.launch.engines.remote.routes import choose_addresses, list_needed, list_peers


def fact(address: str, machine: str, *own: str) -> dict[str, Any]:
    return {"address": address, "machine": machine, "addresses": list(own)}


def test_ranks_meet_where_ssh_reaches_their_hosts() -> None:
    one, two = fact("10.0.0.1", "a", "10.0.0.1"), fact("10.0.0.2", "b", "10.0.0.2")
    assert choose_addresses([one, two]) == ["10.0.0.1", "10.0.0.2"]
    assert choose_addresses([one]) == ["127.0.0.1"], "one host needs no network"


def test_hosts_that_are_this_machine() -> None:
    here = fact("127.0.0.1", "a", "fe80::9", "10.0.0.9")
    assert choose_addresses([here, here]) == ["127.0.0.1"] * 2
    assert choose_addresses([here, fact("10.0.0.2", "b")]) == ["", "10.0.0.2"], (
        "it has to say which others reach"
    )


def test_whom_a_host_looks_for_a_way_to() -> None:
    here = fact("127.0.0.1", "a", "172.17.0.1", "10.0.0.9")
    two, three = fact("10.0.0.2", "b", "172.17.0.1", "10.0.0.2"), fact("::1", "c", "172.17.0.1", "10.0.0.3")
    assert list_peers([here, two, three], 0) == ["10.0.0.2", "10.0.0.3"], "the bridge of containers is no way"
    assert list_peers([here, two, three], 2) == ["10.0.0.2", "10.0.0.9"]


def test_each_host_is_tried_by_another_one() -> None:
    assert [list_needed(node, 4, store_only=False) for node in range(4)] == [[1], [0, 2], [0, 3], [0]]
    assert [list_needed(node, 2, store_only=False) for node in range(2)] == [[1], [0]]
    assert [list_needed(node, 3, store_only=True) for node in range(3)] == [[], [0], [0]]


def test_a_host_is_told_of_some_others_only() -> None:
    facts = [fact("127.0.0.1", str(node), f"10.0.{node >> 8}.{node & 255}") for node in range(1000)]
    assert len(list_peers(facts, 0)) == 64
