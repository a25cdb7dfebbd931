"""How a node's part of a run ended, and what that makes of the run on the other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ....errors import RunStoppedError, WorkerError
from ....events import Failure
from ....trust import plain
from ...transfer import failures
from ..base import Outcome
from .node_info import NodeInfo

OutcomeKind = Literal["done", "failed", "lost", "stopped", "called off"]
_KIND_BYTES: Final = 64  # of a message, besides its value
_MAX_TEXT: Final = 1 << 16
_MAX_FRAMES: Final = 100
_MAX_ARGUMENTS: Final = 8


@dataclass(frozen=True, kw_only=True)
class NodeOutcome:
    """How a node's part of the run ended.

    Attributes:
        node: the node.
        kind: `called off` where it was ended because of another node.
        failure: of its first rank that failed; None where no rank failed.
        follows: whether that failure is one that ranks have when another rank is gone.
        text: what happened, where no rank failed.
        hang: the report of the hang that ended the ranks, else empty.
    """

    node: NodeInfo
    kind: OutcomeKind
    failure: Failure | None = None
    follows: bool = False
    text: str = ""
    hang: str = ""


@dataclass(frozen=True, kw_only=True)
class RestartCause:
    """Why a node starts its workers again.

    Attributes:
        text: what happened there.
        follows: whether it is a failure that ranks have when another rank is gone.
    """

    text: str
    follows: bool = False


def choose_cause(causes: Sequence[RestartCause]) -> RestartCause | None:
    """Return the cause that explains others, None where there is none."""
    return min(causes, key=lambda cause: cause.follows, default=None)


def summarize(outcome: Outcome, node: NodeInfo, *, is_complete: bool) -> NodeOutcome:
    """Return how a node's part ended, for the other nodes.

    Args:
        outcome: how it ended here.
        node: this node.
        is_complete: whether all its ranks have returned.
    """
    if outcome.failures:
        failure = failures.find_first(outcome.failures)
        return NodeOutcome(node=node, kind="failed", failure=failure, follows=failures.is_lost_peer(failure))
    if outcome.hang:
        hang = f"{node.name}: {outcome.hang}"
        return NodeOutcome(node=node, kind="failed", text=hang, hang=hang)
    if outcome.was_stopped:
        return NodeOutcome(node=node, kind="stopped", text=f"{node.name} was stopped")
    if not is_complete:
        return NodeOutcome(node=node, kind="called off", text=f"{node.name} was called off")
    return NodeOutcome(node=node, kind="done")


def shorten(outcome: NodeOutcome, limit: float) -> NodeOutcome:
    """Return an outcome that nodes without a secret take from each other.

    Args:
        outcome: how a node's part ended. Where it is too long, its exception keeps its type, the beginning of its
            text, and its last frames.
        limit: bytes of a message.
    """
    failure = outcome.failure
    if failure is None or failure.error is None:
        return outcome
    if len(plain.encode(NodeOutcome, outcome, proven=False)) + _KIND_BYTES <= limit:
        return outcome
    error = failure.error
    arguments = error.arguments
    if arguments is not None:
        arguments = [
            each[:_MAX_TEXT] if isinstance(each, str) else each for each in arguments[:_MAX_ARGUMENTS]
        ]
    error = replace(
        error,
        message=error.message[:_MAX_TEXT],
        arguments=arguments,
        frames=error.frames[-_MAX_FRAMES:],
        notes=(f"It was too long for the other nodes: the notebook of {outcome.node.name} has all of it.",),
        parts=(),
        cause=None,
        context=None,
    )
    return replace(outcome, failure=replace(failure, error=error))


def find_cause(node_outcomes: Sequence[NodeOutcome]) -> NodeOutcome | None:
    """Return the outcome that caused the others, None where all nodes ended well.

    Args:
        node_outcomes: in the order in which they came; of two that may be the cause the earlier one counts.
    """
    order: dict[OutcomeKind, int] = {"failed": 0, "lost": 0, "stopped": 1, "called off": 3}
    bad = [each for each in node_outcomes if each.kind != "done"]
    return min(bad, key=lambda each: 2 if each.follows else order[each.kind], default=None)


def blame(cause: NodeOutcome, outcome: Outcome) -> Outcome:
    """Return the outcome of a run that ended because of another node.

    Args:
        cause: how that node ended.
        outcome: how this one did.
    """
    if cause.hang:
        return Outcome(stopped=outcome.stopped, hang=cause.hang)
    error: BaseException | None = None
    if cause.failure is None:
        if cause.kind == "stopped":
            error = RunStoppedError(cause.text)
        else:
            error = WorkerError(cause.text, rank=-1)
        for failure in outcome.failures:
            failures.add_note(error, failures.describe_failure(failure))
    return Outcome(
        failures=outcome.failures,
        stopped=outcome.stopped,
        cause=None if cause.failure is None else failures.rename_files(cause.failure),
        where=cause.node.name,
        error=error,
    )
