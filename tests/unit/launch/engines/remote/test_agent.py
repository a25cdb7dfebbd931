"""What an agent finds out about its host."""

from __future__ import annotations

import pytest

from notebook_accel.launch.checks import addresses
from notebook_accel.launch.engines.remote import agent


def test_the_address_is_the_one_that_the_system_sends_from(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"10.0.0.2": "10.0.0.9", "fe80::2": "fe80::9%eth0", "127.0.0.2": "127.0.0.1"}
    monkeypatch.setattr(addresses, "find_own_address", lambda peer: ways.get(peer, ""))
    assert agent.locate(["10.0.0.2"]).address == "10.0.0.9"
    assert agent.locate(["10.9.9.9", "127.0.0.2", "fe80::2"]).address == "fe80::9", "the others lead nowhere"
    lost = agent.locate(["10.9.9.9"])
    assert not lost.address and "no route to the other hosts (10.9.9.9): name it by" in lost.problem
    assert "no address of their own" in agent.locate([]).problem
