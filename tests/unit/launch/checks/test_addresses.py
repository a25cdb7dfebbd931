"""Addresses of this machine, and those by which others know it."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from notebook_accel.launch.checks import addresses
from tests.ports import reserve_port


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's name, as Debian's hosts file has it."""
    real = socket.getaddrinfo

    def found(host: Any, *more: Any, **options: Any) -> Any:
        return real("127.0.1.1" if host == "worker-0" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return "worker-0"


def test_a_name_that_is_the_loopback_here_alone_is_open_to_others(own_name: str) -> None:
    assert addresses.choose_listen_address(own_name) == ""
    for host in ("localhost", "127.0.0.1", "::1", "192.0.2.1"):
        assert addresses.choose_listen_address(host) == host
    for host, everywhere in ((own_name, True), ("localhost", False)):
        with addresses.listen_for_nodes(host) as listening:
            assert (listening.getsockname()[0] in ("::", "0.0.0.0")) is everywhere


def test_whether_an_address_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_HERE_SECONDS", 0.2)
    with reserve_port() as port:
        assert addresses.is_this_machine("127.0.0.1", port)
        assert not addresses.is_this_machine("192.0.2.1", port)
        assert not addresses.is_this_machine("no-such-host.invalid", port)


def test_nothing_listens_wider_than_it_must() -> None:
    own = addresses.find_own_address("192.0.2.1") or "127.0.0.1"
    for host in ("127.0.0.1", own):
        with addresses.listen_for_nodes(host) as listening:
            assert listening.getsockname()[0] == host
    with addresses.listen_for_nodes("192.0.2.1") as listening:
        assert listening.getsockname()[0] in ("::", "0.0.0.0"), "it may lead here from outside"


def test_public_addresses() -> None:
    assert addresses.find_public_address("8.8.8.8") == "8.8.8.8"
    for host in (
        "127.0.0.1",
        "::1",
        "10.0.0.1",
        "172.31.43.8",
        "192.168.0.1",
        "169.254.0.1",
        "no-such-host.invalid",
    ):
        assert addresses.find_public_address(host) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "worker-0"])
def test_many_nodes_connect_before_one_is_accepted(host: str, own_name: str) -> None:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(addresses.listen_for_nodes(host)).getsockname()[1]
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
