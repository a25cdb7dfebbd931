"""What a run has said so far."""

from __future__ import annotations

from notebook_accel.events import Line
from notebook_accel.stream.record import RunRecord


def test_a_record_that_a_cell_shows_does_not_fill_it() -> None:
    record = RunRecord()
    for number in range(1000):
        record.apply(Line(rank=0, time=float(number), stream="stdout", text="a line of output"))
    assert len(record.lines()) == 1000
    assert len(repr(record)) < 200
