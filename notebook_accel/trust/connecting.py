"""Connects to a listening socket of the run, by proof; a connection that a flood of others pushed out tries again."""

from __future__ import annotations

import socket
import time
from typing import Final

from . import proof
from .proof import Answer, Session

_PAUSE_SECONDS: Final = 0.05


def connect(
    endpoint: tuple[str, int], key: bytes, purpose: str, *, claim: int = 0, timeout: float
) -> tuple[socket.socket, Session]:
    """Connect, and prove both ends.

    Args:
        endpoint: host and port.
        key: what both ends know.
        purpose: what the connection is for.
        claim: a number that the proof is about, such as a rank.
        timeout: seconds for all of it.

    Returns:
        The connection, which has no timeout, and the tags of what follows.

    Raises:
        OSError: nobody answers, or not in time; `proof.ProofError` where the other end does not know the key.
    """
    deadline, was_refused = time.monotonic() + timeout, False
    refusal = f"what listens at {endpoint[0]}:{endpoint[1]} ends the connection"
    while True:
        connection = socket.create_connection(endpoint, max(deadline - time.monotonic(), _PAUSE_SECONDS))
        try:
            answer = Answer(key, purpose, _read(connection, proof.GREETING_BYTES, deadline), claim)
            connection.sendall(answer.content)
            session = answer.check(_read(connection, proof.REPLY_BYTES, deadline))
            connection.settimeout(None)
            return connection, session
        except (
            EOFError,
            BrokenPipeError,
            ConnectionResetError,
            ConnectionAbortedError,  # so Windows says it
        ):  # refused, or dropped for others that came
            connection.close()
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                raise proof.ProofError(refusal) from None
            was_refused = True
            time.sleep(_PAUSE_SECONDS)
        except BaseException as error:
            connection.close()
            if was_refused and isinstance(error, TimeoutError):  # the last try had little time
                raise proof.ProofError(refusal) from None
            raise


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return so many bytes; EOFError where the other end has ended the connection."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), _PAUSE_SECONDS))
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
