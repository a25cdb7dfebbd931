"""The connection that keeps a host for a run."""

from __future__ import annotations

import secrets
import socket
import sys

import pytest

from notebook_accel.launch.engines.remote.holding import Hold

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


def test_it_connects_also_where_the_other_process_listens_later() -> None:
    name = secrets.token_hex(8)
    hold = Hold(name)
    hold.try_connect()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        hold.try_connect()
        hold.try_connect()
        listening.settimeout(10)
        connection = listening.accept()[0]
        with connection:
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):  # there is one connection
                listening.accept()
            hold.close()
            assert connection.recv(1) == b""


def test_no_name_is_no_connection() -> None:
    hold = Hold("")
    hold.try_connect()
    hold.close()
