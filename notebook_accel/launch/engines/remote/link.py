"""A connection to the agent of a host: the program that leads to it, and what is said by its pipes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from ....events import Event
from ....stream.wire import FrameError, FrameReader, frame_lines
from ... import signals
from .client import MARK, Client, Connector, Wanted
from .keep_alive import KEEP_ALIVE, SILENCE_SECONDS, KeepAlive
from .messages import Cleared, ClearOrder, Devices
from .transport import Transport

_BYTES: Final = 1 << 18
_MOST_NOISE: Final = 1 << 20
_LINES: Final = 60
_READS: Final = 64  # in one look
_PROVEN_SECONDS: Final = 1.0
_SHELLS_SIGNAL: Final = 128  # a shell ends with this and the number of the signal that has ended its command
_MOST_SIGNALS: Final = 64


class Link:
    """A connection to a host.

    Args:
        client: starts the agent there.
        host: as its command line takes it.
        python: the Python there, None to find one.
        transport: the way to the agent.
        nonce: marks our lines of it, before the agent is there.
        facts: what the host has said of itself, where the agent is there already.

    Attributes:
        host: as above.
        client: as above.
        key: what a launch that may use this connection has alike.
        facts: what the host says of itself, empty before it does.
        is_ready: whether the agent is there.
        devices: what processes there compute on; None before it is known.
        is_asked: whether the agent has not answered the last `ask` yet.
        lost: why the connection has ended, empty where it has not.
        is_silent: whether it is lost because nothing came from it; the agent there may live a while longer.
    """

    def __init__(
        self,
        client: Client,
        host: str,
        python: str | None,
        transport: Transport,
        *,
        nonce: str = "",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.host = host
        self.client = client
        self.key = (client, host, python)
        self.facts = facts or {}
        self.is_ready = facts is not None
        self.devices: Devices | None = None
        self.is_asked = False
        self.lost, self.is_silent = "", False
        self._nonce = nonce
        self._noise = bytearray()
        self._frames = FrameReader()
        self._outgoing: deque[memoryview] = deque()
        self._sending = threading.Lock()
        self._said: deque[str] = deque(maxlen=_LINES)
        self._others: deque[str] = deque(maxlen=_LINES)
        self._unfinished = b""
        self._keep_alive = KeepAlive(time.monotonic(), SILENCE_SECONDS)
        self._heard = -math.inf  # when an answer came last, by the monotonic clock
        self._transport = transport

    @classmethod
    def open(cls, client: Connector, host: str, python: str | None, wanted: Wanted) -> Link:
        """Return a connection that is being made.

        Args:
            client, host, python: as above.
            wanted: what the environment there has to be.
        """
        nonce = secrets.token_hex(8)
        return cls(client, host, python, client.connect(host, python, nonce, wanted), nonce=nonce)

    def fileno(self) -> int:
        """Return the descriptor that can be read when something has come."""
        return self._transport.incoming

    @property
    def node(self) -> str:
        """What connections to one machine have alike."""
        return str(self.facts.get("node", self.host))

    @property
    def stdin_fileno(self) -> int:
        """The descriptor that is written to."""
        return self._transport.outgoing

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        return self._transport.filenos()

    @property
    def said(self) -> list[str]:
        """The last lines of the client's errors and of the agent's; without any, what a shell has written."""
        last = self._unfinished.decode(errors="replace")
        lines = [*self._said, *([last] if last.strip() else [])]
        return lines or list(self._others)

    @property
    def exitcode(self) -> int | None:
        """The client's exit code, None while it runs."""
        return self._transport.exitcode

    # -- what comes

    def receive(self) -> list[Event]:
        """Return what has come, without waiting; `lost` says where nothing can come any more."""
        events: list[Event] = []
        heard = False
        for _ in range(_READS):
            if self.lost:
                break
            self._read_errors()
            try:
                data = os.read(self.fileno(), _BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            heard = True
            if not data:
                self._lose()
                break
            try:
                events += self._take(data)
            except (FrameError, ConnectionError) as error:
                events += getattr(error, "events", ())
                self.lost = f"what it sends cannot be read ({error})"
        if not self.lost and self._keep_alive.is_lost(time.monotonic(), heard=heard):
            self.lost, self.is_silent = f"nothing has come from it for {SILENCE_SECONDS:g} s", True
        for event in events:
            if event.rank >= 0:
                continue
            if isinstance(event, Devices):
                self.devices = event
            if isinstance(event, Cleared):
                self.is_asked = False
                self._heard = time.monotonic()
        return events

    def _take(self, data: bytes) -> list[Event]:
        if not self.is_ready:
            data = self._find_facts(data)
        return self._frames.feed(data)

    def _find_facts(self, data: bytes) -> bytes:
        """Read our lines among what a shell there writes; return what follows the last one."""
        self._noise += data
        mark = f"{MARK}{self._nonce}:".encode()
        while (newline := self._noise.find(b"\n")) >= 0:
            line = bytes(self._noise[:newline])
            del self._noise[: newline + 1]
            if mark not in line:
                self._others += [line.decode(errors="replace")] if line.strip() else []
                continue
            with contextlib.suppress(ValueError):
                self.facts = json.loads(line.partition(mark)[2])
            if self.facts.get("ready"):
                self.is_ready = True
                self._others.clear()
                rest = bytes(self._noise)
                self._noise.clear()
                if not self.facts.get("has_devices"):
                    self.devices = Devices(rank=-1, time=time.time(), label="", count=0)
                return rest
        del self._noise[:-_MOST_NOISE]
        return b""

    def _read_errors(self) -> None:
        if self._transport.errors < 0:
            return
        with contextlib.suppress(OSError):
            while data := os.read(self._transport.errors, _BYTES):
                *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                self._said += [line.decode(errors="replace").rstrip() for line in lines]

    def _lose(self) -> None:
        self._transport.wait()  # its output has ended, and it is about to
        self._read_errors()
        code = self.exitcode or 0
        telling = self.client.find_telling_line(self.said)
        if code < 0:
            how = f"{self.client.program} was ended by {signals.name_of(-code)}"
        elif _SHELLS_SIGNAL < code <= _SHELLS_SIGNAL + _MOST_SIGNALS:
            how = f"the agent there was ended by {signals.name_of(code - _SHELLS_SIGNAL)}"
            how += f": {telling}" if " " in telling else ""  # a shell says "Killed"
        else:
            how = telling or f"{self.client.program} ended with code {code}"
        self.lost = f"its {self.client.connection} has ended ({how})"

    # -- what goes

    def send(self, event: Event) -> None:
        """Send an event or order; any thread may call it, and it never waits: `flush` sends the rest."""
        with self._sending:
            self._outgoing += map(memoryview, frame_lines([event]))
            self._flush()

    def keep_alive(self) -> None:
        """Say that this process lives, where it says nothing else."""
        with self._sending:
            if not self._outgoing:
                self._outgoing.append(memoryview(KEEP_ALIVE))
                self._flush()

    def flush(self) -> None:
        """Send what is waiting, as much as goes without waiting."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing and not self.lost:
                part = self._outgoing[0]
                self._outgoing[0] = part[os.write(self.stdin_fileno, part) :]
                if not self._outgoing[0]:
                    self._outgoing.popleft()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._outgoing.clear()  # reading says why

    def wait(self, seconds: float) -> None:
        """Wait until something has come, so many seconds at most, and send meanwhile."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if self.has_outgoing:
            poll.register(self.stdin_fileno, select.POLLOUT)
        poll.poll(seconds * 1000)
        self.flush()

    @property
    def has_outgoing(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    # -- between launches, and at the end

    def is_usable(self) -> bool:
        """Return whether a launch may use the connection that has rested."""
        self._keep_alive = KeepAlive(time.monotonic(), SILENCE_SECONDS)
        self.receive()
        return not self.lost and self.exitcode is None

    @property
    def is_proven(self) -> bool:
        """Whether the agent has answered just now that it is free."""
        return not self.is_asked and time.monotonic() - self._heard < _PROVEN_SECONDS

    def ask(self) -> None:
        """Let the agent end what is left of a run, and answer: it is there then, and free."""
        self.is_asked = True
        self.send(ClearOrder(rank=-1, time=time.time()))

    def close(self) -> None:
        """End the client; the agent ends what it has."""
        with self._sending:  # who sends in another thread may not meet descriptors that mean something else
            self.lost = self.lost or "it was closed"
        self._transport.close()
