"""The parts of a session that need no worker: calls, cells, waits, orders."""

from __future__ import annotations

import atexit
import builtins
import os
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from notebook_accel import devices, events, runtime
from notebook_accel.errors import LaunchError
from notebook_accel.launch import hang, registry, signals, sources
from notebook_accel.launch.job import Job
from notebook_accel.launch.whereabouts import BACKWARD, Whereabouts, collective_of
from notebook_accel.session import cells, connections, service
from notebook_accel.session.call import Call
from notebook_accel.stopping import StopPoint
from notebook_accel.stream.inbox import Inbox
from notebook_accel.stream.sinks import TextSink
from notebook_accel.stream.wire import FrameReader, frame

NOW = 1.0


def where(rank: int, collective: str, seconds: float, line: int = 3) -> events.Where:
    place = events.Frame(
        filename="/tmp/ipykernel_1/2.py", lineno=line, first_lineno=1, name="f", qualname="f"
    )
    return events.Where(rank=rank, time=NOW, call=1, collective=collective, seconds=seconds, frames=[place])


def test_a_wait_is_told_with_the_line_of_each_rank() -> None:
    text = hang.sentence({0: where(0, "barrier", 12.0), 1: where(1, "", 30.0, line=7)}, (), (), 10.0)
    first, *rows, _ = text.splitlines()
    assert first == "rank 0 has waited for 12 s in barrier, which rank 1 has not entered:"
    assert rows == ["  rank 0: in barrier, a cell, line 3", "  rank 1: a cell, line 7"]


def test_ranks_that_are_done_or_take_no_part_are_told() -> None:
    text = hang.sentence({0: where(0, BACKWARD, 12.0)}, [1], [2], 10.0)
    assert "which ranks 1, 2 have not entered" in text
    assert "rank 1: has ended the call" in text and "rank 2: takes no part in the call" in text


def test_ranks_in_different_collectives_are_told() -> None:
    text = hang.sentence({0: where(0, "barrier", 12.0), 1: where(1, "recv", 11.0)}, (), (), 10.0)
    assert text.startswith("ranks 0, 1 have waited for 12 s in different collectives:")


@pytest.mark.parametrize(
    "wheres",
    [
        {0: where(0, "barrier", 9.0), 1: where(1, "", 30.0)},  # not long enough
        {0: where(0, "barrier", 90.0), 1: where(1, "barrier", 30.0)},  # all are there
        {0: where(0, "", 90.0), 1: where(1, "", 90.0)},  # they compute
    ],
)
def test_what_is_no_wait_for_absent_ranks_is_not_told(wheres: dict[int, events.Where]) -> None:
    assert hang.sentence(wheres, (), (), 10.0) == ""


def test_a_thread_that_stands_still_is_seen_to() -> None:
    go = threading.Event()

    def stand() -> None:
        go.wait(10)

    thread = threading.Thread(target=stand)
    thread.start()
    assert thread.ident is not None
    looker = Whereabouts(thread.ident)
    time.sleep(0.05)
    looker.look()
    time.sleep(0.1)
    seen = looker.look()
    go.set()
    thread.join()
    assert 0.09 < seen.seconds < 5
    assert "stand" in [frame.name for frame in seen.frames] and seen.collective == ""


def test_collectives_are_known_by_their_outermost_function() -> None:
    def stack(*places: tuple[str, str]) -> list[Any]:
        codes = [types.SimpleNamespace(co_filename=file, co_name=name) for file, name in places]
        return [types.SimpleNamespace(f_code=code) for code in codes]

    torch_file = "/x/torch/distributed/distributed_c10d.py"
    assert collective_of(stack(("cell", "f"), (torch_file, "wrapper"), (torch_file, "barrier"))) == "barrier"
    assert (
        collective_of(stack((torch_file, "all_gather_object"), (torch_file, "all_gather")))
        == "all_gather_object"
    )
    assert collective_of(stack(("/x/notebook_accel/comm/torch_dist.py", "all_gather"))) == "all_gather"
    assert collective_of(stack(("/x/torch/autograd/graph.py", "_engine_run_backward"))) == BACKWARD
    assert collective_of(stack(("/x/notebook_accel/comm/torch_dist.py", "positions"))) == ""


class Told:
    """Takes orders and kills instead of workers."""

    def __init__(self, ranks: int = 2, **options: Any) -> None:
        self.orders: list[events.Order] = []
        self.killed: list[int] = []
        self.call = Call(
            number=4,
            name="f",
            ranks=frozenset(range(ranks)),
            pids={rank: 100 + rank for rank in range(ranks)},
            tell=self.orders.append,
            kill=self.killed.append,
            **options,
        )

    def end(self, rank: int, number: int = 4, positions: dict[str, int] | None = None) -> None:
        result = events.Result(rank=rank, time=NOW, value=b"")
        self.call.take(
            events.CallEnd(rank=rank, time=NOW, call=number, outcome=result, positions=positions or {})
        )

    def fail(self, rank: int) -> None:
        failure = events.Failure(rank=rank, time=NOW, pid=100 + rank)
        self.call.take(events.CallEnd(rank=rank, time=NOW, call=4, outcome=failure, positions={}))

    def advance_until(self, kind: type[events.Order] | None, seconds: float = 8.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.call.advance(TextSink("none"))
            if self.killed if kind is None else any(isinstance(order, kind) for order in self.orders):
                return
            time.sleep(0.01)
        raise AssertionError(f"no {kind}: {self.orders}")


def test_a_late_end_of_another_call_is_not_this_ones() -> None:
    told = Told()
    told.end(0, number=3)
    assert told.call.left == {0, 1}
    told.end(0)
    assert told.call.left == {1} and told.call.results.keys() == {0}


def test_after_a_failure_the_others_are_brought_back_more_and_more_firmly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accel.session.call._RELEASE_SECONDS", 0.1)
    told = Told(grace=0.1)
    told.fail(0)
    told.call.advance(TextSink("none"))
    assert not told.orders
    told.advance_until(events.InterruptOrder)
    assert not told.call.was_released and told.call.told == {1}
    told.advance_until(events.ReleaseOrder)
    assert told.call.was_released and [order.rank for order in told.orders] == [1, 1]
    told.advance_until(None)
    assert told.killed == [1]


def test_a_rank_that_comes_back_in_time_is_left_alone() -> None:
    told = Told(grace=0.1)
    told.fail(0)
    told.call.advance(TextSink("none"))
    told.end(1)
    assert not told.orders and not told.call.left and not told.call.told


def test_a_stop_gives_all_ranks_the_same_question() -> None:
    told = Told()
    told.call.stop(5.0)
    told.call.advance(TextSink("none"))
    assert [type(order) for order in told.orders] == [events.HoldOrder, events.HoldOrder]
    told.call.take(events.Held(rank=0, time=NOW, questions=3))
    told.call.take(events.Held(rank=1, time=NOW, questions=5))
    told.advance_until(events.StopOrder)
    stops = [order for order in told.orders if isinstance(order, events.StopOrder)]
    assert [(order.rank, order.question) for order in sorted(stops, key=lambda order: order.rank)] == [
        (0, 6),
        (1, 6),
    ]


def test_a_stop_interrupts_ranks_that_do_not_ask() -> None:
    told = Told()
    told.call.stop(60.0)
    told.call.advance(TextSink("none"))
    for rank in (0, 1):
        told.call.take(events.Held(rank=rank, time=NOW, questions=0))
    told.advance_until(events.InterruptOrder)
    assert told.call.was_interrupted


def test_a_stop_point_forgets() -> None:
    point = StopPoint()
    point.set(1)
    assert point.reached()
    point.reset()
    assert not point.reached()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The variables of a worker, in this process."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield module.__dict__
    loop = module.__dict__.get("__loop__")
    if loop is not None:
        loop.close()


def test_a_cell_leaves_its_variables_and_shows_its_value(worker: dict[str, Any], capsys: Any) -> None:
    cells.execute("x = 2\nx + 1", "<cell>")
    cells.execute("x * 10;", "<cell>")
    cells.execute("if x:\n    y = x\n", "<cell>")
    cells.execute("import asyncio\nawait asyncio.sleep(0, 'done')", "<cell>")
    assert capsys.readouterr().out == "Out: 3\nOut: 'done'\n"
    assert worker["y"] == 2 and worker["_"] == "done"


def test_a_semicolon_in_a_text_hides_nothing(worker: dict[str, Any], capsys: Any) -> None:
    cells.execute("'a;'", "<cell>")
    cells.execute("1;  # hidden", "<cell>")
    cells.execute("", "<cell>")
    assert capsys.readouterr().out == "Out: 'a;'\n"


def test_commands_and_magics_of_a_cell(worker: dict[str, Any], capfd: Any) -> None:
    worker["name"] = "here"
    shell = cells.CellShell()
    shell.system("echo $name {name}")
    assert worker["_exit_code"] == 0
    assert shell.getoutput("printf 'a\\nb'") == ["a", "b"]
    shell.run_line_magic("time", "z = 1")
    assert worker["z"] == 1
    shell.run_line_magic("timeit", "z")
    shell.run_cell_magic("time", "", "z = 2")
    out = capfd.readouterr().out
    assert out.startswith("here here\n") and out.count("wall time") == 2 and "a loop" in out
    assert shell.run_line_magic("pwd", "") == os.getcwd()
    with pytest.raises(NotImplementedError, match="%who works in the notebook itself"):
        shell.run_line_magic("who", "")
    with pytest.raises(NotImplementedError, match="%%html works in"):
        shell.run_cell_magic("html", "", "<b>")


def test_variables_are_pushed_and_pulled(worker: dict[str, Any]) -> None:
    service.push({"a": 1})
    assert service.pull("a") == 1
    with pytest.raises(NameError, match="no variable 'b' on this worker; there are: a"):
        service.pull("b")


def test_orders_that_do_not_fit_wait_for_the_polls() -> None:
    here, there = socket.socketpair()
    inbox = Inbox()
    inbox.add(0, {"events": here})
    big = events.CallOrder(rank=0, time=NOW, call=1, work=b"x" * 5_000_000, sends_value=True)
    last = events.LeaveOrder(rank=0, time=NOW)
    inbox.tell(big)
    inbox.tell(last)
    reader, received = FrameReader(), list[events.Event]()
    there.setblocking(False)
    deadline = time.monotonic() + 10
    while len(received) < 2 and time.monotonic() < deadline:
        inbox.poll(0.0)
        try:
            received += reader.feed(there.recv(1 << 20))
        except BlockingIOError:
            continue
    assert received == [big, last]
    inbox.tell(events.LeaveOrder(rank=5, time=NOW))  # there is no such rank
    there.close()
    inbox.tell(last)  # it has ended
    inbox.close()


def test_unfinished_lines_are_drained() -> None:
    here, there = socket.socketpair()
    read_end, write_end = os.pipe()
    inbox = Inbox()
    with open(read_end, "rb", buffering=0) as out:
        inbox.add(0, {"events": here, "stdout": out})  # type: ignore[dict-item]
        os.write(write_end, b"whole\npart")
        lines = inbox.drain(0)
        os.write(write_end, b"next\n")
        lines += inbox.drain(0)
        assert [event.text for event in lines if isinstance(event, events.Line)] == ["whole", "part", "next"]
        os.close(write_end)
        there.close()
        inbox.close()


def test_connections_to_others_end_and_no_others() -> None:
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        pairs.append((near, far))
    connections.close_to([1])  # nobody that this process is connected to
    for near, far in pairs:
        near.sendall(b"a")
        assert far.recv(1) == b"a"
    connections.close_to([os.getpid()])
    for near, far in pairs:
        assert near.recv(1) == b"" and far.recv(1) == b""
        near.close()
        far.close()


def test_only_new_sources_are_collected() -> None:
    import linecache

    linecache.cache["<a cell of a test>"] = (3, None, ["x=1"], "<a cell of a test>")
    try:
        assert sources.collect()["<a cell of a test>"] == ["x=1"]
        assert "<a cell of a test>" not in sources.collect({"<a cell of a test>"})
    finally:
        del linecache.cache["<a cell of a test>"]


def test_interrupts_are_held_by_the_outermost_block() -> None:
    import signal

    done = []
    with pytest.raises(KeyboardInterrupt), signals.interrupt_held():
        with signals.interrupt_held():
            signal.raise_signal(signal.SIGINT)
        done.append("goes on")
    assert done == ["goes on"]


def test_a_call_travels_as_a_frame() -> None:
    order = events.CallOrder(
        rank=1,
        time=NOW,
        call=2,
        work=b"f",
        buffers=[bytearray(b"abc")],
        sends_value=False,
        sources={"c": ["x"]},
    )
    (back,) = FrameReader().feed(b"".join(bytes(part) for part in frame(order)))
    assert back == order


def test_where_an_error_was_raised_is_looked_for_in_its_context() -> None:
    def error(filename: str, context: events.RaisedError | None = None) -> events.RaisedError:
        place = events.Frame(filename=filename, lineno=3, first_lineno=1, name="f", qualname="f")
        return events.RaisedError(type_name="E", message="", pickled=None, frames=[place], context=context)

    raised = error(threading.__file__, error("/tmp/ipykernel_1/2.py"))
    found = hang.place_of_error(raised)
    assert found is not None and found.filename == "/tmp/ipykernel_1/2.py"
    assert hang.place_of_error(error(threading.__file__)) is None


def test_runs_and_sessions_see_each_others_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        is_over = False
        job = replace(Job(function=print), holds=("0",))

        def __repr__(self) -> str:
            return "<the session that holds 0>"

    kind = next(row for row in devices.KINDS if row.name == "cuda")
    monkeypatch.setattr(devices, "best", lambda use_cpu=None: kind)
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    monkeypatch.setattr(runtime, "_sessions", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    held = Held()
    registry.add_session(held)
    taken = registry.settled(Job(function=print, num_processes=1, serve=service.serve))
    assert taken.holds == ("1",) and taken.environment["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(LaunchError, match=r"0 by <the session that holds 0>.*close a session"):
        registry.settled(Job(function=print, num_processes=2))
    held.is_over = True
    assert registry.settled(Job(function=print, num_processes=2)).holds == ("0", "1")
    atexit.unregister(registry._close_sessions)
