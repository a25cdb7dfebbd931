"""Hosts that look whether they reach each other before ranks start."""

from __future__ import annotations

import select
import socket
import threading

from notebook_accel.launch.engines.remote.messages import Place
from notebook_accel.launch.engines.remote.reaching import Reach, drop_connections
from tests.unit.clock import PATIENCE_S


def reach(*ports: int) -> str | None:
    is_told = threading.Event()
    found = Reach([Place(host=f"h{port}", address="127.0.0.1", port=port) for port in ports], is_told.set)
    assert is_told.wait(30)
    return found.problem


def test_a_place_where_nobody_listens_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port, closed = there.getsockname()[1], bound.getsockname()[1]
        assert reach() == "" and reach(port) == "" and reach(port, port) == ""
        said = reach(port, closed)
    assert said is not None
    assert said.startswith(f"it cannot connect to h{closed} at 127.0.0.1:{closed} (Connection refused)")
    assert "firewall" in said


def test_who_tried_is_no_client_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        assert reach(there.getsockname()[1]) == ""
        assert select.select([there], [], [], PATIENCE_S)[0], "the system has noted who tried"
        drop_connections(there)
        with socket.create_connection(there.getsockname()) as client:
            there.settimeout(30)
            connection, address = there.accept()
            connection.close()
            assert address == client.getsockname()
