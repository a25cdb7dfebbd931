"""The thread that obeys the notebook's orders: what it does once it hears none any more."""

from __future__ import annotations

import queue
import socket
import threading

from notebook_accel.events import InterruptOrder, LeaveOrder, Order, StopOrder, WriteOrder
from notebook_accel.launch.worker.order_listener import OrderListener
from notebook_accel.stopping import StopPoint
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.wire import frame
from tests.unit.clock import PATIENCE_S


def test_who_hears_no_more_orders_obeys_those_before_and_leaves() -> None:
    here, there = socket.socketpair()
    orders, stop_point = queue.Queue[Order](), StopPoint()
    OrderListener(here, Emitter(here, rank=3), stop_point, orders.put, lambda: None)
    (thread,) = [each for each in threading.enumerate() if each.name == "notebook_accel listener"]
    interrupt = InterruptOrder(rank=3, time=1.0, call=1)
    stop = StopOrder(rank=3, time=1.0, question=1)
    there.sendall(b"".join([*frame(stop), *frame(interrupt)]))
    there.shutdown(socket.SHUT_WR)
    assert orders.get(timeout=PATIENCE_S) == interrupt
    assert isinstance(orders.get(timeout=PATIENCE_S), LeaveOrder), "a worker that serves calls ends"
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and stop_point.reached()
    here.close()
    there.close()


def test_what_has_no_newline_is_written_out_by_itself_and_by_an_order() -> None:
    here, there = socket.socketpair()
    written = threading.Semaphore(0)
    OrderListener(here, Emitter(here, rank=3), StopPoint(), lambda order: None, written.release)
    for _ in range(2):
        assert written.acquire(timeout=PATIENCE_S)
    for _ in range(100):
        there.sendall(b"".join(frame(WriteOrder(rank=3, time=1.0))))
    for _ in range(100):
        assert written.acquire(timeout=PATIENCE_S)
    there.close()
    here.close()
