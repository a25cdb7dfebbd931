"""The thread that obeys the notebook's orders: what it does once it hears none any more."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from notebook_accel.events import LeaveOrder, Order, ReleaseOrder, StopOrder, WriteOrder
from notebook_accel.launch.worker.order_listener import OrderListener
from notebook_accel.stopping import StopPoint
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.wire import frame
from tests.unit.clock import PATIENCE_S


@pytest.mark.parametrize("garbage", [bytes(4), b"", b"\0\0\0\1" + bytes(8)])
def test_who_hears_no_more_orders_obeys_those_before_and_leaves(
    garbage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = socket.socketpair()
    orders, stop_point = queue.Queue[Order](), StopPoint()
    OrderListener(here, Emitter(here, rank=3), stop_point, orders.put)
    (thread,) = [each for each in threading.enumerate() if each.name == "notebook_accel listener"]
    release = ReleaseOrder(rank=3, time=1.0, call=1, pids=[])
    stop = StopOrder(rank=3, time=1.0, question=1)
    there.sendall(b"".join([*frame(stop), *frame(release), garbage]))
    if not garbage:
        there.shutdown(socket.SHUT_WR)
    assert orders.get(timeout=PATIENCE_S) == release
    assert isinstance(orders.get(timeout=PATIENCE_S), LeaveOrder), "a worker that serves calls ends"
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and stop_point.reached()
    said = capsys.readouterr().err
    assert ("rank 3 hears no more orders: what the notebook sends cannot be read" in said) == bool(garbage)
    here.close()
    there.close()


def test_what_has_no_newline_is_written_out_by_itself_and_by_an_order() -> None:
    here, there = socket.socketpair()
    written = threading.Semaphore(0)
    OrderListener(here, Emitter(here, rank=3), StopPoint(), write_out=written.release)
    for _ in range(2):
        assert written.acquire(timeout=PATIENCE_S)
    for _ in range(100):
        there.sendall(b"".join(frame(WriteOrder(rank=3, time=1.0))))
    for _ in range(100):
        assert written.acquire(timeout=PATIENCE_S)
    there.close()
    here.close()
