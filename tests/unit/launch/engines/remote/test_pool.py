"""Connections of a process: none is lost, whenever the user interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.remote import link as links
from notebook_accel.launch.engines.remote import pool as pools
from notebook_accel.launch.engines.remote.client import Wanted
from notebook_accel.launch.engines.remote.link import Link
from notebook_accel.launch.engines.remote.pool import Pool
from notebook_accel.launch.engines.remote.transport import ProcessTransport
from notebook_accel.launch.engines.ssh.command import SshClient

WANTED = Wanted(python="3.11", torch="2.13.0", package="0.1", with_ipython=False, takes_over=False)


def make_client(folder: Path, script: str) -> SshClient:
    """Return a client whose program is a script of the shell."""
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return SshClient((str(program),))


def find_pid(link: Link) -> int:
    """Return the process id of the program that leads to a host."""
    assert isinstance(link._transport, ProcessTransport)
    return link._transport.pid


@pytest.fixture
def client(tmp_path: Path) -> SshClient:
    """A client that reaches its host, which says nothing."""
    return make_client(tmp_path, "exec sleep 1000")


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    for link in list(pool._all):
        pool.put(link, is_clean=False)
    pool.close()


@pytest.mark.parametrize("where", ["made", "waiting", "closing"])
def test_an_interrupt_loses_no_client(
    where: str, client: SshClient, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Link] = []

    def interrupt(owner: Any, name: str) -> None:
        """Interrupt each time that a method has been called."""
        call = getattr(owner, name)

        def interrupted(*given: Any, **more: Any) -> Any:
            value = call(*given, **more)
            signal.raise_signal(signal.SIGINT)
            return value

        monkeypatch.setattr(owner, name, interrupted)

    class Made(Link):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

    monkeypatch.setattr(pools, "Link", Made)
    if where == "made":
        interrupt(Made, "__init__")
    else:
        interrupt(Pool, "_start")
    if where == "closing":
        interrupt(Made, "close")
    with pytest.raises(KeyboardInterrupt), pool.borrow(client, {"one": None, "two": None}, WANTED):
        raise AssertionError("no host is there")
    assert made and not pool._all and all(link.exitcode is not None for link in made)


def test_what_a_shell_says_in_place_of_a_python_is_told(tmp_path: Path, pool: Pool) -> None:
    client = make_client(tmp_path, "echo This account is not available.\nexit 1")
    with (
        pytest.raises(
            LaunchError, match=r"code 1, and no Python .* there \(This account is not available\.\)"
        ),
        pool.borrow(client, {"one": None}, WANTED),
    ):
        raise AssertionError("no host is there")


@pytest.fixture
def here(tmp_path: Path) -> SshClient:
    """A client that starts agents on this machine."""
    return make_client(tmp_path, 'for word; do :; done\nexec sh -c "$word"')


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_connection_that_has_ended_while_it_rested_is_replaced(
    end: signal.Signals, here: SshClient, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, wanted = {"one": None, "two": None}, Wanted.here()
    monkeypatch.setattr(pools, "_PROOF_SECONDS", 60.0)
    with pool.borrow(here, hosts, wanted) as first:
        pass
    with pool.borrow(here, hosts, wanted) as second:
        assert second == first
    monkeypatch.setattr(Link, "is_usable", lambda link: True)  # it ends just after somebody has looked
    monkeypatch.setattr(Link, "is_proven", False)
    client = psutil.Process(find_pid(second[1]))
    ended = [client, *client.children(recursive=True)]
    try:
        for process in ended:
            process.send_signal(end)
        if end == signal.SIGSTOP:
            monkeypatch.setattr(pools, "_PROOF_SECONDS", 3.0)
        with pool.borrow(here, hosts, wanted) as third:
            assert third[1] is not first[1]
            assert third[1].exitcode is None and not third[1].lost
        assert second[1].exitcode is not None
    finally:
        for process in ended:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("error", [KeyboardInterrupt, LaunchError], ids=["an interrupt", "a stop"])
def test_what_comes_while_an_answer_is_waited_for_leaves_no_connection(
    error: type[BaseException], here: SshClient, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, wanted = {"one": None}, Wanted.here()
    with pool.borrow(here, hosts, wanted) as first:
        pass
    monkeypatch.setattr(Link, "is_proven", False)
    monkeypatch.setattr(Link, "receive", lambda link: [])  # its answer is on its way

    def come() -> None:
        raise error

    with pytest.raises(error):
        pool.open(here, hosts, wanted, come)
    assert not pool._resting and not pool._all and first[0].exitcode is not None


def test_a_launch_asks_an_agent_once(here: SshClient, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It borrows the connections several times before it starts anything."""
    asked: list[Link] = []
    ask = Link.ask
    monkeypatch.setattr(Link, "ask", lambda link: (asked.append(link), ask(link)))
    monkeypatch.setattr(links, "_PROVEN_SECONDS", 600.0)
    monkeypatch.setattr(pools, "_PROOF_SECONDS", 60.0)
    for _ in range(4):
        with pool.borrow(here, {"one": None}, Wanted.here()):
            pass
    assert len(asked) == 1


def test_an_ended_connection_to_a_host_that_nobody_uses_is_waited_for(client: SshClient, pool: Pool) -> None:
    link = pool._start(client, "one", None, WANTED)
    pool.put(link, is_clean=True)
    os.kill(find_pid(link), signal.SIGKILL)
    os.waitid(os.P_PID, find_pid(link), os.WEXITED | os.WNOWAIT)
    with pytest.raises(LaunchError), pool.borrow(SshClient(("false",)), {"two": None}, WANTED):
        raise AssertionError("no host is there")
    assert not psutil.pid_exists(find_pid(link))
    assert pool._keeping_alive is None, "no host is left to which somebody has to say that this process lives"


def test_a_connection_whose_answer_is_on_its_way_is_not_kept(client: SshClient, pool: Pool) -> None:
    link = pool._start(client, "one", None, WANTED)
    link.ask()
    pool.put(link, is_clean=True)
    assert not pool._resting and link.exitcode is not None
