"""The process that drives a run on hosts without the notebook, on the first of them: their agents connect to it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from ....stream.listener import Listener
from ....stream.logs import make_folder
from ....stream.wire import frame_lines
from ...checks import addresses, outliving
from ...job import Job
from ...transfer.pickled import Pickled
from ...transfer.shared_memory import SharedPickle
from ..attempts import Wait
from ..detached.driving import Driver
from ..detached.folder import LOG, Folder, describe_here, make
from .client import Client
from .hosts_engine import HostsEngine, Origin
from .hosts_group import Lender
from .link import Link
from .messages import Devices, Driven
from .transport import SocketTransport

_LOOK_SECONDS: Final = 0.02
_JOIN_SECONDS: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the notebook knows of a host.

    Attributes:
        name: of the host.
        facts: see `Link.facts`.
        devices: see `Link.devices`.
    """

    name: str
    facts: Mapping[str, Any]
    devices: Devices | None


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is driven.

    Attributes:
        job: fields of the job, see `list_parts`.
        pickled: the function with its arguments.
        origin: what the ranks take from the notebook.
        hosts: in the order of their ranks.
        counts: number of ranks of each.
    """

    job: Mapping[str, Any]
    pickled: Pickled
    origin: Origin
    hosts: Sequence[HostFacts]
    counts: Sequence[int]


class _JoinedClient(Client):
    program: ClassVar[str] = "agent"
    connection: ClassVar[str] = "connection"

    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return all that is known of a connection of TCP."""
        return "its agent has ended, or the network"


class _JoinedHosts(Lender):
    """The hosts of a run, each of which connects once.

    Args:
        listener: lets their agents in.
        hosts: in the order of their ranks.
    """

    def __init__(self, listener: Listener, hosts: Sequence[HostFacts]) -> None:
        self._listener, self._hosts = listener, hosts
        self._links: dict[int, Link] = {}

    def wait(self) -> bool:
        """Wait for their agents; return whether all have come."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while self._listener.missing and time.monotonic() < deadline:
            for number, connection in self._listener.admit():
                host = self._hosts[number]
                link = Link(_JoinedClient(), host.name, None, SocketTransport(connection), facts=host.facts)
                link.devices = host.devices
                self._links[number] = link
            time.sleep(_LOOK_SECONDS)
        return not self._listener.missing

    def open(self, wait: Wait) -> list[Link]:
        """Return a connection to each host."""
        return [self._links[number] for number in range(len(self._hosts))]

    def find_obstacle(self, wait: Wait) -> str:
        """Return that a host is lost: only the notebook could start an agent there again."""
        lost = [f"{link.host} ({link.lost})" for link in self._links.values() if link.lost]
        return f"a detached run cannot connect again to {', '.join(lost)}" if lost else ""

    def take_back(self, link: Link, *, is_clean: bool) -> None:
        """Keep the connection for the next attempt."""
        if not is_clean:
            link.close()

    def give_back(self, *, is_stopped: bool) -> None:
        """End the agents."""
        for link in self._links.values():
            link.close()


class _JoinedEngine(HostsEngine):
    """Starts ranks by agents that have joined.

    Args:
        work: what is driven.
        lender: has the hosts.
    """

    name = "ssh"

    def __init__(self, work: Work, lender: Lender) -> None:
        self._work, self._lender = work, lender

    def make_lender(self, job: Job) -> Lender:
        """Return what has the hosts."""
        return self._lender

    def count_ranks(self, job: Job) -> list[int]:
        """Return the number of ranks of each host."""
        return [*self._work.counts]

    def take(self, job: Job) -> tuple[Pickled, Origin]:
        """Return what the notebook gave."""
        return self._work.pickled, self._work.origin


def main(layout: Any, reply_fd: int, *fds: int) -> int:
    """Drive a run; return the exit code.

    Args:
        layout: of the memory with a pickled `Work`.
        reply_fd: of a socket that gets a `Driven`.
        fds: of the memory.
    """
    with contextlib.ExitStack() as held:
        with socket.socket(fileno=reply_fd) as reply:
            try:
                with contextlib.closing(SharedPickle.from_filenos(layout, fds)) as payload:
                    work: Work = payload.open()
                listener = held.enter_context(
                    contextlib.closing(Listener(addresses.listen_everywhere(), len(work.hosts)))
                )
                folder = _make_folder(work, held)
                answer = Driven(
                    rank=-1,
                    time=time.time(),
                    number=folder.number,
                    port=listener.port,
                    token=listener.token,
                    remark=outliving.describe_killer(),
                )
            except Exception as error:  # the notebook tells it
                answer = Driven(rank=-1, time=time.time(), problem=str(error) or repr(error))
            for part in frame_lines([answer]):
                reply.sendall(part)
        if answer.problem:
            return 1
        hosts = _JoinedHosts(listener, work.hosts)
        if not hosts.wait():  # the notebook has told that, or was ended before it said the last word
            folder.remove()
            return 1
        Driver(folder).run(_JoinedEngine(work, hosts))
        return 0


def _make_folder(work: Work, held: contextlib.ExitStack) -> Folder:
    """Return the folder of the run, which this process holds, and which gets its own output."""
    job, directory = Job(**work.job), work.origin.start.directory
    if job.log_dir is not None:  # as a rank understands it
        base = directory if os.path.isdir(directory) else "~"
        job = replace(job, log_dir=make_folder(Path(base).expanduser() / Path(job.log_dir).expanduser()))
    folder = make()
    try:
        held.enter_context(contextlib.closing(folder.hold()))
        folder.fill(job, work.origin.notes.sources, describe_here())
        log = os.open(folder.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for fd in (1, 2):
            os.dup2(log, fd)
        os.close(log)
    except BaseException:
        folder.remove()
        raise
    return folder
