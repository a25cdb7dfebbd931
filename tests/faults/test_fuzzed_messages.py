"""Any bytes on a connection or in a returned value: a value comes out, or the peer is refused."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import struct
import traceback
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from notebook_accel.events import Event, Failure, Frame, Lines, Metric, RaisedError
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.nodes import messages, outcomes
from notebook_accel.launch.engines.nodes.messages import GUEST_LIMIT, MEMBER_LIMIT, Message, MessageKind
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, Roster
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.launch.transfer import failures
from notebook_accel.launch.transfer.plain_values import pack_plain, unpack_plain
from notebook_accel.stream.inbox import Inbox
from notebook_accel.stream.wire import FrameError, FrameReader, frame
from notebook_accel.trust import proof
from notebook_accel.trust.plain import MalformedError
from notebook_accel.trust.secret import Trust
from tests.faults.fuzzing import TEXTS, change_bytes, fuzz, make_documents

SECRET = Trust("correct horse battery staple")
NODE = NodeInfo(node_rank=1, host="one", processes=2, same={"torch": "2.9"})
FRAMES = [Frame(filename="a.py", lineno=3, first_lineno=1, name="f", qualname="C.f", columns=(3, 1, 2))]
CAUSE = RaisedError(type_name="KeyError", message="'a'", pickled=None, frames=FRAMES, arguments=["a"])
ERROR = RaisedError(
    type_name="ValueError",
    message="b",
    pickled=None,
    frames=FRAMES,
    arguments=["b"],
    notes=["n"],
    cause=CAUSE,
)
OUTCOME = NodeOutcome(node=NODE, kind="failed", failure=Failure(rank=1, time=1.0, pid=7, error=ERROR))
ROSTER = Roster(node_rank=0, host_rank=1, nodes=[NODE, NODE], addresses=["::1", "10.0.0.1"], port=29500)
VALUES: dict[MessageKind, Any] = {
    "node": (NODE, 0),
    "outcome": OUTCOME,
    "trouble": None,
    "value": (1.0, ""),
    "present": [NODE],
    "roster": ROSTER,
    "refused": "why",
    "again": 3,
    "verdict": OUTCOME,
}


def parse(data: bytes, session: Any = None, limit: Any = MEMBER_LIMIT) -> Message | None:
    """Return the first message of some bytes; None where more are needed, or where it is a beat."""
    stream = io.BytesIO(data)

    def take(size: int) -> bytes:
        if size > len(data) - stream.tell():
            raise EOFError
        return stream.read(size)

    with contextlib.suppress(EOFError):
        return messages.read(take, session, lambda: limit)
    return None


@st.composite
def wire_messages(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from([*VALUES, *get_args(MessageKind), "x"]))
    known = kind in VALUES
    whole = b"".join(messages.encode(Message(kind, VALUES[kind]), None)) if known else b"[]"
    value = json.loads(whole[whole.index(b"[") :])[1] if known else None
    content = draw(make_documents([kind, value]))
    parts = [content, *draw(st.lists(st.binary(max_size=9), max_size=3))]
    head = struct.pack("<I", len(parts)) + b"".join(struct.pack("<Q", len(part)) for part in parts)
    return draw(st.sampled_from([head + b"".join(parts)]) | change_bytes(whole))


@fuzz(600)
@given(wire_messages() | st.binary(max_size=40), st.sampled_from([MEMBER_LIMIT, GUEST_LIMIT]))
def test_messages_of_nodes(data: bytes, limit: Any) -> None:
    try:
        found = parse(data, limit=limit)
    except MalformedError:
        return
    if found is not None:
        again = parse(b"".join(messages.encode(found, None)), limit=limit)
        assert again == found or "nan" in repr(found)


@fuzz(200)
@given(st.sampled_from(list(VALUES)), st.data())
def test_a_message_that_was_changed_has_not_the_tag_of_its_connection(kind: MessageKind, data: Any) -> None:
    challenge = proof.Challenge(b"k" * 32, "nodes")
    answer = proof.Answer(b"k" * 32, "nodes", challenge.greeting)
    acceptance = challenge.accept(answer.content)
    whole = b"".join(messages.encode(Message(kind, VALUES[kind]), answer.check(acceptance.reply)))
    changed = data.draw(change_bytes(whole))
    with contextlib.suppress(MalformedError, proof.ProofError):
        found = parse(changed, acceptance.session)
        assert found is None or changed.startswith(whole)


VALUE = {"a": [1, 2.5, "x", None, True, (3,), {4}, b"bytes", 2**70, 1j]}


@fuzz(500)
@given(st.data())
def test_returned_values(data: Any) -> None:
    import torch

    whole = bytes(pack_plain({**VALUE, "t": torch.arange(3.0), "b": torch.tensor([True])}, 1e6))
    try:
        found = unpack_plain(data.draw(change_bytes(whole)))
    except MalformedError:
        return
    with contextlib.suppress(Exception):
        repr(found)


KINDS = st.sampled_from(
    [name for name, kind in vars(__import__("builtins")).items() if isinstance(kind, type)]
    + ["MyError", "__import__"]
)
ARGUMENTS = st.lists(st.one_of(TEXTS, st.integers(), st.floats(), st.booleans(), st.none()), max_size=6)
LINES = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 300))
ANY_FRAMES = st.lists(
    st.builds(
        Frame,
        filename=TEXTS,
        lineno=LINES,
        first_lineno=LINES,
        name=TEXTS,
        qualname=TEXTS,
        columns=st.none() | st.tuples(LINES, LINES, LINES),
    ),
    max_size=3,
)
ERRORS = st.recursive(
    st.builds(
        RaisedError,
        type_name=KINDS,
        message=TEXTS,
        pickled=st.none(),
        frames=ANY_FRAMES,
        arguments=st.none() | ARGUMENTS,
        notes=st.lists(TEXTS, max_size=2),
    ),
    lambda inner: st.builds(
        RaisedError,
        type_name=KINDS,
        message=TEXTS,
        pickled=st.none(),
        frames=ANY_FRAMES,
        arguments=st.none() | ARGUMENTS,
        parts=st.lists(inner, max_size=3),
        cause=st.none() | inner,
        context=st.none() | inner,
    ),
    max_leaves=4,
)


@fuzz(500)
@given(ERRORS)
@example(
    RaisedError(
        type_name="UnicodeEncodeError", message="", pickled=None, frames=[], arguments=["a", "b", -9, -8, "c"]
    )
)
def test_errors_of_other_nodes_can_be_shown(raised: RaisedError) -> None:
    failure = Failure(rank=1, time=1.0, pid=7, error=raised)
    outcome = outcomes.blame(NodeOutcome(node=NODE, kind="failed", failure=failure), Outcome())
    assert outcome.cause is not None and outcome.cause.error is not None
    error = failures.revive(outcome.cause.error, 1, 7)
    assert isinstance(error, BaseException) and not isinstance(error, (SystemExit, KeyboardInterrupt))
    assert traceback.format_exception(error)


# -- frames of workers, which are pickles: only their headers and ends are fuzzed

SENT: Sequence[Event] = [
    Lines(rank=0, time=1.0, stream="stdout", texts=("a",)),
    Lines(rank=0, time=1.0, stream="stderr", texts=("b",)),
    Metric(rank=0, time=1.0, values={"loss": 0.5}),
]
WHOLE = b"".join(bytes(part) for event in SENT for part in frame(event))


@fuzz(500)
@given(st.integers(0, len(WHOLE)), st.binary(max_size=20), st.lists(st.integers(0, 1_000), max_size=5))
def test_frames_of_workers(cut: int, garbage: bytes, places: list[int]) -> None:
    data = WHOLE[:cut] + struct.pack("!I", 0) + garbage
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    reader, found = FrameReader(), list[Event]()
    with contextlib.suppress(FrameError):
        for a, b in itertools.pairwise(edges):
            try:
                found += reader.feed(data[a:b])
            except FrameError as error:
                found += error.events
                raise
    assert found == list(SENT[: len(found)])


@fuzz()
@given(st.binary(max_size=40))
def test_answers_to_a_challenge(garbage: bytes) -> None:
    challenge = proof.Challenge(b"k" * 32, "ranks")
    with pytest.raises(proof.ProofError):
        challenge.accept(garbage)
    with pytest.raises(proof.ProofError):
        proof.Answer(b"k" * 32, "ranks", garbage).check(garbage)


def test_an_inbox_without_ranks_waits() -> None:
    inbox = Inbox()
    assert inbox.poll(0.0) == []
    inbox.close()
