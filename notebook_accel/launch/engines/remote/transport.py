"""The pipes, or the connection, that lead to the agent of a host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from ... import signals

_CLOSE_SECONDS: Final = 2.0


class Transport(ABC):
    """Two ways between this process and the agent of a host, which never wait.

    Attributes:
        incoming: descriptor that brings what the agent says.
        outgoing: descriptor that takes what is said to it.
        errors: descriptor of the pipe that brings errors as lines; -1 where there is none.
    """

    incoming: int
    outgoing: int
    errors: int

    @property
    @abstractmethod
    def exitcode(self) -> int | None:
        """The exit code of the program that leads to the host, None while it runs."""

    @abstractmethod
    def wait(self) -> None:
        """Wait a moment for the end of the program: its output has ended."""

    @abstractmethod
    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep; none once it is closed."""

    @abstractmethod
    def close(self) -> None:
        """End the program, and close the descriptors."""


class ProcessTransport(Transport):
    """A program of this machine with pipes to it, such as `ssh`.

    Args:
        command: its command line.
        environment: its variables, None for those of this process.

    Attributes:
        pid: its process id.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self._process = process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # an interrupt of the cell is not for it
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._pipes = (process.stdin, process.stdout, process.stderr)
        self.pid = process.pid
        self.outgoing, self.incoming, self.errors = (pipe.fileno() for pipe in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def exitcode(self) -> int | None:
        """The program's exit code, None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait a moment for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_SECONDS)

    def filenos(self) -> list[int]:
        """Return our ends of its pipes."""
        return [pipe.fileno() for pipe in self._pipes if not pipe.closed]

    def close(self) -> None:
        """End it."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            signals.kill(self.pid)
            self._process.wait()


class SocketTransport(Transport):
    """A connection that an agent has made to this process.

    Args:
        connection: of TCP.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._again = connection, connection.dup()  # a selector takes a descriptor once
        self.incoming, self.outgoing, self.errors = connection.fileno(), self._again.fileno(), -1

    @property
    def exitcode(self) -> int | None:
        """None: no program of this machine leads to the host."""
        return None

    def wait(self) -> None:
        """Do nothing."""

    def filenos(self) -> list[int]:
        """Return both descriptors of the connection."""
        return [each.fileno() for each in (self._connection, self._again) if each.fileno() >= 0]

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._again.close()
