"""What the exception of a run says of ranks that did not fail."""

from __future__ import annotations

import time

import pytest

from notebook_accel.events import Failure, RaisedError, Result
from notebook_accel.launch.durations import Start
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.run_errors import build_error
from notebook_accel.launch.transfer import failures
from notebook_accel.stream.record import RunRecord


def describe(text: str, returned: int, later: int = 0) -> list[str]:
    """Return the notes where rank 0 raised, after some ranks had returned and before others did."""
    start = Start(wall=time.time() - 30.0, moment=time.monotonic() - 30.0)
    record = RunRecord()
    for rank in range(1, 1 + returned + later):
        moment = start.wall + (5.0 if rank <= returned else 25.0)
        record.apply(Result(rank=rank, time=moment, value=b""))
    raised: RaisedError = failures.describe(RuntimeError(text))
    failure = Failure(rank=0, time=start.wall + 15.0, pid=7, error=raised, moment=start.moment + 15.0)
    record.apply(failure)
    return build_error(Outcome(failures=(failure,)), record, "f", start)[1]


def test_ranks_that_had_returned_are_named_where_one_lost_a_peer() -> None:
    first, *returned = describe("Connection closed by peer", 2, later=1)
    assert first == "rank 0 (process 7) raised this after 15.0 s"
    assert [line.partition(" took no part")[0] for line in returned] == ["rank 1", "rank 2"]
    assert all(line.endswith("after 5.0 s") for line in returned)


@pytest.mark.parametrize(("returned", "last"), [(8, "rank 8 took"), (63, "and so for 55 more ranks")])
def test_of_many_some_are_named_and_the_others_counted(returned: int, last: str) -> None:
    notes = describe("Connection closed by peer", returned)
    assert notes[-1].startswith(last) and len(notes) <= 10


def test_other_errors_have_nothing_to_do_with_it() -> None:
    assert len(describe("a bug", 2)) == 1


def test_an_error_has_no_line_for_each_of_very_many_ranks() -> None:
    error = RaisedError(type_name="ValueError", message="bad", pickled=None, frames=())
    failed = [Failure(rank=rank, time=float(rank), pid=rank, error=error) for rank in range(500)]
    outcome = Outcome(failures=tuple(failed), stopped=frozenset(range(500, 8192)))
    notes = build_error(outcome, RunRecord(), "train", Start())[1]
    assert len(notes) == 1 + 64 + 2
    assert notes[-2:] == ["435 more ranks failed", "7,692 more ranks were stopped by the launcher"]
