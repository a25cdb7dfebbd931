"""How a node's part of a run ended, and what that makes of the run on the other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ....errors import RunStoppedError, WorkerError
from ....events import Failure
from ... import failures
from ..base import Outcome
from .cards import Card

EndKind = Literal["done", "failed", "lost", "stopped", "called off"]


@dataclass(frozen=True, kw_only=True)
class End:
    """How a node's part of the run ended; `called off` is what the others did to it.

    Attributes:
        card: the node's.
        failure: of its first rank that failed.
        follows: whether that failure is one that ranks have when another one leaves.
        text: what happened where no rank failed.
        hang: where the ranks were that were ended because nothing went on any more.
    """

    card: Card
    kind: EndKind
    failure: Failure | None = None
    follows: bool = False
    text: str = ""
    hang: str = ""


def end_of(outcome: Outcome, card: Card, *, is_complete: bool) -> End:
    """Return how a node ended; `is_complete` says that all its ranks have returned."""
    if outcome.failures:
        failure = failures.first(outcome.failures)
        return End(card=card, kind="failed", failure=failure, follows=failures.is_lost_peer(failure))
    if outcome.hang:
        hang = f"{card.name}: {outcome.hang}"
        return End(card=card, kind="failed", text=hang, hang=hang)
    if outcome.was_stopped:
        return End(card=card, kind="stopped", text=f"{card.name} was stopped")
    if not is_complete:
        return End(card=card, kind="called off", text=f"{card.name} was called off")
    return End(card=card, kind="done")


def first_of(ends: Sequence[End]) -> End | None:
    """Return what began it all, of ends in the order in which they were heard; None where all is well."""
    ranks: dict[EndKind, int] = {"done": 4, "failed": 0, "lost": 0, "stopped": 1, "called off": 3}
    bad = [end for end in ends if end.kind != "done"]
    return min(bad, key=lambda end: 2 if end.follows else ranks[end.kind], default=None)


def spoken(end: End | None) -> str:
    """Say how a node ended, None for well."""
    if end is None:
        return "the others have ended"
    return end.text or (
        f"{end.card.name}: {failures.one_line(end.failure)}" if end.failure else end.card.name
    )


def by_another(outcome: Outcome, cause: End) -> Outcome:
    """Return the outcome of a run that ended because of another node."""
    if cause.hang:
        return Outcome(stopped=outcome.stopped, hang=cause.hang)
    error: BaseException | None = None
    if cause.failure is None:
        if cause.kind == "stopped":
            error = RunStoppedError(cause.text)
        else:
            error = WorkerError(cause.text, rank=-1)
        for failure in outcome.failures:
            failures.add_note(error, failures.one_line(failure))
    return Outcome(
        failures=outcome.failures,
        stopped=outcome.stopped,
        cause=None if cause.failure is None else failures.with_own_cells(cause.failure),
        where=cause.card.name,
        error=error,
    )
