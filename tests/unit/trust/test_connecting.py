"""Connections that are refused."""

from __future__ import annotations

import socket
import threading

import pytest

from notebook_accel.trust import connecting
from notebook_accel.trust.proof import ProofError


def test_a_refusal_is_told_also_where_the_last_try_is_not_answered() -> None:
    held = []

    def refuse_once(listening: socket.socket) -> None:
        listening.accept()[0].close()
        held.append(listening.accept()[0])  # which says nothing

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=refuse_once, args=(listening,))
        thread.start()
        with pytest.raises(ProofError, match="ends the connection"):
            connecting.connect(listening.getsockname(), bytes(32), "ranks", timeout=2.0)
        thread.join()
        held[0].close()


def test_one_that_says_nothing_at_all_is_no_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(TimeoutError):
        connecting.connect(listening.getsockname(), bytes(32), "ranks", timeout=0.2)
