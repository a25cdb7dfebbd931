"""Messages between nodes, as bytes: those of strangers are refused before anything is made of them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.launch.engines.nodes import messages
from notebook_accel.launch.engines.nodes.messages import GUEST_LIMIT, MEMBER_LIMIT, NO_LIMIT, Limit, Message
from notebook_accel.launch.engines.nodes.node_info import NodeInfo
from notebook_accel.trust.plain import MalformedError
from notebook_accel.trust.proof import Answer, Challenge, ProofError, Session

NODE = NodeInfo(node_rank=0, host="one", processes=1)


def make_sessions() -> tuple[Session, Session]:
    """Return both ends of a connection by proof."""
    challenge = Challenge(bytes(32), "nodes")
    answer = Answer(bytes(32), "nodes", challenge.greeting)
    acceptance = challenge.accept(answer.content)
    assert acceptance.session is not None
    return answer.check(acceptance.reply), acceptance.session


def parse(data: bytes, session: Session | None = None, limit: Limit = MEMBER_LIMIT) -> Message | None:
    """Return the message that some bytes begin with; EOFError where they end before it."""
    stream = io.BytesIO(data)

    def take(size: int) -> bytes:
        if size > len(data) - stream.tell():
            raise EOFError
        return stream.read(size)

    return messages.read(take, session, lambda: limit)


def parse_message(data: bytes, session: Session | None = None) -> Message:
    message = parse(data, session)
    assert message is not None
    return message


def join(message: Message, session: Session | None = None) -> bytes:
    return b"".join(messages.encode(message, session))


def make_frame(*parts: bytes) -> bytes:
    sizes = b"".join(struct.pack("<Q", len(part)) for part in parts)
    return struct.pack("<I", len(parts)) + sizes + b"".join(parts)


def test_messages_arrive_with_and_without_a_secret() -> None:
    for theirs, ours in [(None, None), make_sessions()]:
        for message in (
            Message("node", (NODE, 2)),
            Message("value", (1.5, ""), [b"abc", b""]),
            Message("trouble"),
        ):
            found = parse_message(join(message, theirs), ours)
            assert (found.kind, found.value, [bytes(part) for part in found.parts]) == (
                *message[:2],
                list(message[2]),
            )


def test_parts_of_any_shape_arrive() -> None:
    sent = Message(
        "value", (1.5, ""), [pickle.PickleBuffer(np.empty((0, 3))), pickle.PickleBuffer(np.ones((2, 2)))]
    )
    assert [len(part) for part in parse_message(join(sent)).parts] == [0, 32]


def test_a_frame_that_was_changed_or_recorded_is_refused() -> None:
    theirs, ours = make_sessions()
    first, second = join(Message("refused", "a"), theirs), join(Message("refused", "b"), theirs)
    with pytest.raises(ProofError):
        parse(first.replace(b'"a"', b'"c"'), ours)
    theirs, ours = make_sessions()
    first = join(Message("refused", "a"), theirs)
    assert parse_message(first, ours).value == "a"
    for recorded in (first, second):
        with pytest.raises(ProofError):
            parse(recorded, ours)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0xFFFFFFFF),
        make_frame(b"{}"),
        make_frame(b'["node", 1]'),
        make_frame(b'["other", null]'),
        make_frame(b'[["node"], null]'),
        make_frame(json.dumps(["verdict", {"node": {}}]).encode()),
        struct.pack("<IQ", 1, MEMBER_LIMIT.value + 1),
        struct.pack("<IQQ", 2, 2, MEMBER_LIMIT.parts + 1),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        parse(data)


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "made",)

    for content in (pickle.dumps(Touch()), pickle.dumps(("outcome", Touch()))):
        for session in (None, make_sessions()[1]):
            with pytest.raises((MalformedError, ProofError, EOFError)):
                parse(make_frame(content), session)
    assert not (tmp_path / "made").exists()


def test_a_beat_is_no_message() -> None:
    assert parse(messages.BEAT) is None


def test_guests_send_no_values() -> None:
    data = join(Message("value", (1.0, ""), [b"abc"]))
    assert parse_message(data).parts
    with pytest.raises(MalformedError):
        parse(data, limit=GUEST_LIMIT)


@settings(max_examples=300)
@given(
    st.binary(max_size=80)
    | st.lists(st.binary(max_size=30), min_size=1, max_size=3).map(lambda parts: make_frame(*parts))
    | st.tuples(st.sampled_from(["node", "value", "again", "roster"]), st.text(max_size=8)).map(
        lambda pair: make_frame(f'["{pair[0]}", {json.dumps(pair[1])}]'.encode())
    ),
    st.booleans(),
)
def test_any_bytes_are_a_message_or_refused(data: bytes, proven: bool) -> None:
    """What a header claims takes no memory."""
    tracemalloc.start()
    try:
        parse(data, make_sessions()[1] if proven else None, NO_LIMIT)
    except (MalformedError, ProofError, EOFError):
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20
