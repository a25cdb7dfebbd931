"""Connections of a worker to its peers."""

from __future__ import annotations

import os
import socket

from notebook_accel.session import connections


def test_connections_to_others_end_and_no_others() -> None:
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        pairs.append((near, far))
    connections.close_connections_to([1])  # nobody that this process is connected to
    for near, far in pairs:
        near.sendall(b"a")
        assert far.recv(1) == b"a"
    connections.close_connections_to([os.getpid()])
    for near, far in pairs:
        assert near.recv(1) == b"" and far.recv(1) == b""
        near.close()
        far.close()
