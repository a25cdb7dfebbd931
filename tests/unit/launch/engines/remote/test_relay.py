"""What a relay does to events on their way."""

from __future__ import annotations

import pickle

from notebook_accel.events import CallEnd, CallOrder, Event, Phase, Result
from notebook_accel.launch.engines.remote.relay import wrap_buffers
from notebook_accel.stream.wire import decode, encode


def pass_twice(event: Event) -> Event:
    """Return an event as it arrives through a relay, with memory that nobody may write to."""
    parts = [bytes(part.raw() if isinstance(part, pickle.PickleBuffer) else part) for part in encode(event)]
    again = encode(wrap_buffers(decode(parts)))
    return decode([bytes(part.raw() if isinstance(part, pickle.PickleBuffer) else part) for part in again])


def test_memory_that_nobody_may_write_to_goes_on() -> None:
    part = pickle.PickleBuffer(b"abc")
    result = Result(rank=0, time=0.0, value=b"v", buffers=[part])
    passed = pass_twice(result)
    assert isinstance(passed, Result) and bytes(passed.buffers[0]) == b"abc"  # type: ignore[arg-type]
    end = pass_twice(CallEnd(rank=0, time=0.0, call=1, outcome=result, collectives=None))
    assert isinstance(end, CallEnd) and isinstance(end.outcome, Result)
    assert bytes(end.outcome.buffers[0]) == b"abc"  # type: ignore[arg-type]
    order = CallOrder(rank=0, time=0.0, call=1, work=part, buffers=[part], sends_value=True)
    again = pass_twice(order)
    assert isinstance(again, CallOrder) and bytes(again.work) == b"abc"  # type: ignore[arg-type]
    assert [bytes(each) for each in again.buffers] == [b"abc"]  # type: ignore[arg-type]
    phase = Phase(rank=0, time=0.0, name="running")
    assert wrap_buffers(phase) is phase
