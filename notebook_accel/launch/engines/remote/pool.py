"""The connections of this process to hosts: opened side by side, and kept for the next launch."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from .... import interrupts, runtime
from ....errors import LaunchError
from ... import descriptors
from .client import NO_PACKAGE, Connector, Wanted, find_mismatches, suggest_python
from .keep_alive import KEEP_ALIVE_SECONDS
from .link import Link

_OPEN_SECONDS: Final = 60.0
_PROOF_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 0.1


class UnfitHostError(LaunchError):
    """A host has answered, and what it has does not fit: waiting for it is of no use."""


class Kept(Protocol):
    """What leads to hosts, and stays between launches."""

    def close(self) -> None:
        """Let go of the hosts."""


class Pool:
    """Connections that no launch uses now, and the thread that says to all agents that this process lives.

    Attributes:
        pid: of the process that they belong to.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self._resting: dict[Hashable, list[Link]] = {}  # by what a launch that may use them has alike
        self._all: dict[Link, None] = {}  # in the order in which they were made
        self._kept: list[tuple[Hashable, Kept]] = []
        self._waiting: set[object] = set()
        self._told: set[Hashable] = set()
        self._keeping_alive: threading.Thread | None = None
        self._is_empty = threading.Event()
        descriptors.keep_from_forks(self)
        atexit.register(self.close)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        return [fd for link in list(self._all) for fd in link.filenos()]

    def open(
        self,
        client: Connector,
        pythons: Mapping[str, str | None],
        wanted: Wanted,
        check: Callable[[], None],
    ) -> list[Link]:
        """Return a connection to each host; whoever takes them gives them back by `put`.

        It is called in a block of `delay_interrupt`, which lasts until the caller holds them; the waits obey.

        Args:
            client: starts the agents there.
            pythons: the Python of each host, by its name; None finds one.
            wanted: what the environment there has to be.
            check: called several times a second; its exception ends the wait.

        Raises:
            LaunchError: some hosts cannot be used. It has a line for each problem of all hosts.
            UnfitHostError: one of them has another environment.
        """
        links: list[Link] = []
        is_done = False
        try:
            for host, python in pythons.items():
                links.append(self._take(client, host, python) or self._start(client, host, python, wanted))
            self._drop_ended()
            self._replace_dead(client, links, wanted, check)
            self._wait(links, lambda link: link.is_ready, check)
            problems = [problem for link in links for problem in _find_problems(client, link, wanted)]
            if not problems:
                self._wait(links, lambda link: link.devices is not None, check)
                problems = [problem for link in links for problem in _find_problems(client, link, wanted)]
            if problems:
                answered = any(
                    link.facts and find_mismatches(link.host, link.facts, wanted) for link in links
                )
                raise (UnfitHostError if answered else LaunchError)("\n".join(problems))
            is_done = True
            return links
        finally:
            if not is_done:
                for link in links:
                    self.put(link, is_clean=link.devices is not None)

    @contextlib.contextmanager
    def borrow(
        self,
        client: Connector,
        pythons: Mapping[str, str | None],
        wanted: Wanted,
    ) -> Iterator[list[Link]]:
        """Return a connection to each host, for a block that does not wait; see `open`."""
        with interrupts.delay_interrupt():
            links = self.open(client, pythons, wanted, lambda: None)
            try:
                yield links
            finally:
                for link in links:
                    self.put(link, is_clean=True)

    def put(self, link: Link, *, is_clean: bool) -> None:
        """Give a connection back.

        Args:
            link: the connection.
            is_clean: whether the agent is free for another launch. If not, or if an answer is on its way, the
                connection is closed.
        """
        with self._lock:
            # an answer that is on its way would come to the next launch
            if is_clean and not link.is_asked and not link.lost:
                self._resting.setdefault(link.key, []).append(link)
                return
            self._all.pop(link, None)
            thread = None
            if not self._all:
                thread, self._keeping_alive = self._keeping_alive, None
                self._is_empty.set()
        link.close()
        if thread is not None:
            thread.join()

    def keep(self, key: Hashable, kept: Kept) -> None:
        """Hold what leads to hosts until `take_kept`, or until the pool is closed; not where somebody waits for room.

        Args:
            key: what launches that can use it have alike.
            kept: is closed with the connections, or at once.
        """
        with self._lock:
            if is_free := not self._waiting:
                self._kept.append((key, kept))
        if not is_free:
            kept.close()

    def take_kept(self, key: Hashable) -> Kept | None:
        """Return what was kept with a key, None where nothing is."""
        with self._lock:
            for entry in self._kept:
                if entry[0] == key:
                    self._kept.remove(entry)
                    return entry[1]
        return None

    def has_kept(self, key: Hashable) -> bool:
        """Return whether something is kept with a key."""
        return any(entry[0] == key for entry in list(self._kept))

    def is_news(self, what: Hashable) -> bool:
        """Return whether something was not asked for yet, so that the cell says it once."""
        with self._lock:
            is_new = what not in self._told
            self._told.add(what)
        return is_new

    def make_room(self, who: object, kind: type[Kept]) -> None:
        """Close all that was kept and is of a kind, and keep nothing more of it until `end_wait`: a launch needs room.

        Args:
            who: waits for the room.
            kind: class of what takes it.
        """
        with self._lock:
            self._waiting.add(who)
            found = [entry for entry in self._kept if isinstance(entry[1], kind)]
            self._kept = [entry for entry in self._kept if entry not in found]
        for _, kept in found:
            kept.close()

    def end_wait(self, who: object) -> None:
        """Note that somebody has the room, or waits for it no longer; see `make_room`."""
        with self._lock:
            self._waiting.discard(who)

    def close(self) -> None:
        """Close all connections that no launch uses; in a fork they are not its own."""
        if self.pid != os.getpid():
            return
        with interrupts.delay_interrupt():
            for key in [*self._resting]:
                for link in self._resting.pop(key):
                    self.put(link, is_clean=False)
            while self._kept:
                self._kept.pop()[1].close()

    def _take(self, client: Connector, host: str, python: str | None) -> Link | None:
        """Return a connection that has rested, None where there is none."""
        with self._lock:
            key = (client, host, python)
            while rested := self._resting.get(key):
                link = rested.pop(0)
                if not rested:
                    del self._resting[key]
                if link.is_usable():
                    return link
                self.put(link, is_clean=False)
        return None

    def _drop_ended(self) -> None:
        """Close the rested connections whose agent has gone, such as those of hosts that nobody uses any more."""
        with self._lock:
            every = [link for links in self._resting.values() for link in links]
            ended = [link for link in every if link.exitcode is not None]
            self._resting = {}
            for link in every:
                if link.exitcode is None:
                    self._resting.setdefault(link.key, []).append(link)
        for link in ended:
            self.put(link, is_clean=False)

    def _replace_dead(
        self, client: Connector, links: list[Link], wanted: Wanted, check: Callable[[], None]
    ) -> None:
        """Connect anew to each host whose rested connection has no answer: it may have ended a moment ago."""
        rested = {link: None for link in links if link.is_ready and not link.is_proven}
        for link in rested:
            link.ask()
        self._wait([*rested], lambda link: not link.is_asked, check, _PROOF_SECONDS)
        for number, link in enumerate(links):
            if link in rested and (link.lost or link.is_asked):
                links[number] = self._start(client, link.host, link.key[2], wanted)
                self.put(link, is_clean=False)

    def _start(self, client: Connector, host: str, python: str | None, wanted: Wanted) -> Link:
        with self._lock, interrupts.block_interrupt_in_children():
            link = Link.open(client, host, python, wanted)
            self._all[link] = None
            if self._keeping_alive is None:
                self._is_empty = threading.Event()
                self._keeping_alive = threading.Thread(target=self._keep_alive, daemon=True)
                self._keeping_alive.start()
        return link

    def _keep_alive(self) -> None:
        is_empty = self._is_empty
        while not is_empty.wait(KEEP_ALIVE_SECONDS):
            for link in list(self._all):
                link.keep_alive()

    @staticmethod
    def _wait(
        links: Sequence[Link],
        is_there: Callable[[Link], bool],
        check: Callable[[], None],
        seconds: float = _OPEN_SECONDS,
    ) -> None:
        """Wait until each connection is so far or has failed."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            awaited = {link for link in links if not (link.lost or is_there(link))}
            for link in awaited:
                selector.register(link, selectors.EVENT_READ, link)
            while awaited:
                for key, _ in selector.select(_LOOK_SECONDS):
                    link = key.data
                    link.receive()
                    if link.lost or is_there(link):
                        selector.unregister(link)
                        awaited.discard(link)
                interrupts.obey_interrupt()
                check()
                if time.monotonic() > deadline:
                    return


def _find_problems(client: Connector, link: Link, wanted: Wanted) -> list[str]:
    """Return what is wrong with a host, a sentence each."""
    noun = client.host_noun
    by_host = noun == "host"
    if link.facts and (found := find_mismatches(link.host, link.facts, wanted, noun=noun, by_host=by_host)):
        return found
    if link.lost or not link.is_ready:
        if link.exitcode == NO_PACKAGE:
            named = link.key[2]
            what = f"there is no {named}" if named else "there is no Python"
            return [
                f"{noun} {link.host}: {what}: name the right one, {suggest_python(link.host, by_host=by_host)}"
            ]
        return [client.explain_failure(link.host, link.exitcode, link.said)]
    if link.devices is None:
        return [f"{noun} {link.host}: it does not say which devices it has"]
    return []


def get_pool() -> Pool:
    """Return the connections of this process; a fork has none of its parent's."""
    known: list[Pool] = runtime.connections()
    if not known or known[0].pid != os.getpid():
        known[:] = [Pool()]
    return known[0]
