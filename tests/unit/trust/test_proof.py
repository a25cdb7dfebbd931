"""Both ends of a connection prove that they know a key."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.trust.proof import (
    ANSWER_BYTES,
    GREETING_BYTES,
    REPLY_BYTES,
    Answer,
    Challenge,
    ProofError,
    connect,
    make_key,
)
from tests.unit.clock import PATIENCE_S

KEY = make_key()


def test_both_ends_agree_on_the_tags_of_what_follows() -> None:
    challenge = Challenge(KEY, "nodes")
    answer = Answer(KEY, "nodes", challenge.greeting, claim=3)
    assert len(challenge.greeting) == GREETING_BYTES and len(answer.content) == ANSWER_BYTES
    acceptance = challenge.accept(answer.content)
    assert acceptance.claim == 3 and len(acceptance.reply) == REPLY_BYTES
    theirs, ours = answer.check(acceptance.reply), acceptance.session
    for _ in range(2):
        ours.incoming.check_tag(theirs.outgoing.make_tag([b"one", b"two"]), [b"onetwo"])
        theirs.incoming.check_tag(ours.outgoing.make_tag([b"back"]), [b"back"])
    tag = theirs.outgoing.make_tag([b"again"])
    ours.incoming.check_tag(tag, [b"again"])
    with pytest.raises(ProofError):
        ours.incoming.check_tag(tag, [b"again"])  # a frame that was recorded


@pytest.mark.parametrize(("key", "purpose"), [(make_key(), "nodes"), (KEY, "ranks")], ids=["key", "purpose"])
def test_another_key_or_purpose_is_no_proof(key: bytes, purpose: str) -> None:
    challenge = Challenge(KEY, "nodes")
    with pytest.raises(ProofError):
        challenge.accept(Answer(key, purpose, challenge.greeting).content)


def test_a_recorded_answer_and_reply_are_no_proof() -> None:
    first, second = Challenge(KEY, "nodes"), Challenge(KEY, "nodes")
    recorded = Answer(KEY, "nodes", first.greeting)
    reply = first.accept(recorded.content).reply
    with pytest.raises(ProofError):
        second.accept(recorded.content)
    with pytest.raises(ProofError):
        Answer(KEY, "nodes", first.greeting).check(reply)


def test_the_claim_belongs_to_the_proof() -> None:
    challenge = Challenge(KEY, "ranks")
    content = bytearray(Answer(KEY, "ranks", challenge.greeting, claim=1).content)
    content[GREETING_BYTES + 3] = 0
    with pytest.raises(ProofError):
        challenge.accept(content)


@settings(max_examples=100)
@given(st.binary(min_size=ANSWER_BYTES, max_size=ANSWER_BYTES))
def test_no_bytes_of_a_stranger_do_more_than_fail(content: bytes) -> None:
    with pytest.raises(ProofError):
        Challenge(KEY, "nodes").accept(content)


def test_a_connection_that_is_refused_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: listening.accept()[0].close())
        thread.start()
        with pytest.raises(ProofError, match="ends the connection"):
            connect(listening.getsockname(), bytes(32), "ranks", timeout=PATIENCE_S)
        thread.join()


def test_one_that_says_nothing_at_all_is_no_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(TimeoutError):
        connect(listening.getsockname(), bytes(32), "ranks", timeout=0.2)
