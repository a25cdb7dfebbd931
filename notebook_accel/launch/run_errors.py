"""The exception of a run that ended badly, with what happened to each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import HangError, RunStoppedError
from ..events import Failure
from ..stream.record import RunRecord
from .durations import Start, format_duration
from .engines.base import Outcome
from .rank_names import name_process
from .transfer import failures

_MOST_RETURNED: Final = 8
_MOST_NOTES: Final = 64  # of more ranks, how many there are is told


def build_error(
    outcome: Outcome,
    record: RunRecord,
    name: str,
    start: Start,
    stopped: Mapping[int, str] | None = None,
) -> tuple[BaseException, list[str]]:
    """Return the exception of the rank that failed first, and one line for each rank, which are its notes.

    Args:
        outcome: how the run ended, badly.
        record: of the run.
        name: of its function.
        start: of the run.
        stopped: a line for each rank that was stopped, where more is known of it than that.
    """
    if outcome.error is not None:
        return outcome.error, []
    if outcome.hang:
        return HangError(outcome.hang), []
    if not outcome.failures and outcome.cause is None:
        seconds = start.seconds if outcome.ended is None else max(0.0, outcome.ended - start.wall)
        return RunStoppedError(f"{name} was stopped after {format_duration(seconds)}"), []
    cause = outcome.cause or failures.find_first(outcome.failures)
    error = failures.make_error(cause, record.find_last_words(cause.rank))
    notes = _describe_ranks(cause, outcome, start, stopped or {})
    if failures.is_lost_peer(cause):
        notes += _describe_returned(cause, record, start)
    for note in notes:
        failures.add_note(error, note)
    return error, notes


def find_first_failure(outcome: Outcome) -> Failure | None:
    """Return how the rank ended that failed first, on whichever node; None where none failed.

    Args:
        outcome: how the run ended.
    """
    if outcome.hang or outcome.error or not (outcome.cause or outcome.failures):
        return None
    return outcome.cause or failures.find_first(outcome.failures)


def _describe_returned(cause: Failure, record: RunRecord, start: Start) -> list[str]:
    """Return a line for each rank whose function was over when another rank still waited for it."""
    ends = {rank: result.time for rank, result in record.results.items() if result.time <= cause.time}
    ranks = sorted(ends.keys() - {cause.rank})
    lines = [
        f"rank {rank} took no part any more: its function had returned, or called sys.exit(), after "
        f"{format_duration(max(0.0, ends[rank] - start.wall))}"
        for rank in ranks[:_MOST_RETURNED]
    ]
    return lines + [f"and so for {len(ranks) - len(lines)} more ranks"] * (len(ranks) > len(lines))


def _describe_ranks(cause: Failure, outcome: Outcome, start: Start, stopped: Mapping[int, str]) -> list[str]:
    """Return one line for each rank that failed or was stopped, the first failure first."""
    after = start.measure(cause, is_of_here=not outcome.where)
    notes = []
    if cause.error is not None:
        where = f" on {outcome.where}" if outcome.where else ""
        notes.append(
            f"{name_process(cause.rank, cause.pid, cause.node)}{where} raised this after {after:.1f} s"
        )
    others = {
        failure.rank: failures.describe_failure(failure, cause)
        for failure in outcome.failures
        if failure is not cause
    }
    for rank in outcome.stopped - others.keys() - {cause.rank}:
        others[rank] = stopped.get(rank) or f"rank {rank} was stopped by the launcher"
    told = sorted(others, key=lambda rank: (len(others) > _MOST_NOTES and rank in outcome.stopped, rank))
    notes += [others[rank] for rank in told[:_MOST_NOTES]]
    left = told[_MOST_NOTES:]
    count = sum(rank in outcome.stopped for rank in left)
    notes += [f"{len(left) - count:,} more ranks failed"] * (len(left) > count)
    return notes + [f"{count:,} more ranks were stopped by the launcher"] * (count > 0)
