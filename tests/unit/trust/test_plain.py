"""Dataclasses as JSON: what comes out has the type that the reader named, whatever was sent."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.events import Failure, Frame, Pickle, RaisedError
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, Roster
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.trust import plain
from notebook_accel.trust.plain import MalformedError

NODE = NodeInfo(node_rank=1, host="one", processes=2, same={"torch": "2.9"})
FRAME = Frame(filename="a.py", lineno=3, first_lineno=1, name="f", qualname="f", columns=(3, 0, 4))
KINDS = [NodeInfo, Roster, NodeOutcome, list[NodeInfo], tuple[float, str], NodeOutcome | None, int, str, None]


def outcome(pickled: bytes) -> NodeOutcome:
    inner = RaisedError(type_name="B", message="b", pickled=Pickle(pickled), frames=[])
    error = RaisedError(
        type_name="A", message="a", pickled=Pickle(pickled), frames=[FRAME], arguments=["x", 1], cause=inner
    )
    failure = Failure(rank=0, time=1.5, pid=7, error=error)
    return NodeOutcome(node=NODE, kind="failed", failure=failure, text="what\nhappened")


def decode(kind: Any, text: str | bytes, *, proven: bool) -> Any:
    """Return the value of a text; MalformedError also where it is no JSON."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(str(error)) from None
    return plain.load(kind, data, proven=proven)


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_is_said_arrives() -> None:
    for proven in (True, False):
        text = plain.encode(NodeOutcome | None, outcome(b"p"), proven=proven)
        found = decode(NodeOutcome | None, text, proven=proven)
        assert found.node == NODE and found.failure.error.frames == [FRAME]
        assert found.failure.error.cause.message == "b" and found.failure.error.arguments == ["x", 1]
        assert decode(NodeOutcome | None, "null", proven=proven) is None
    roster = Roster(node_rank=0, host_rank=1, nodes=[NODE, NODE], addresses=["10.0.0.1", "::1"], port=29500)
    assert decode(Roster, plain.encode(Roster, roster, proven=False), proven=False) == roster
    entry = (29500, bytes(range(32)))
    assert (
        decode(tuple[int, bytes], plain.encode(tuple[int, bytes], entry, proven=False), proven=False) == entry
    )


def test_pickles_travel_among_proven_peers_only(tmp_path: Path) -> None:
    hostile = pickle.dumps(Touch(tmp_path / "made"))
    with_pickles = plain.encode(NodeOutcome, outcome(hostile), proven=True)
    found = decode(NodeOutcome, with_pickles, proven=True)
    assert found.failure.error.pickled == hostile
    found = decode(NodeOutcome, with_pickles, proven=False)
    assert found.failure.error.pickled is None and found.failure.error.cause.pickled is None
    without = json.loads(plain.encode(NodeOutcome, outcome(hostile), proven=False))
    assert without["failure"]["error"]["pickled"] is None
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "true"),
        (int, "1.0"),
        (int, str(1 << 63)),
        (str, "1"),
        (bool, "1"),
        (bytes, '"*"'),
        (None, "0"),
        (tuple[int, str], '[1, "a", 2]'),
        (NodeInfo, '{"node_rank": 1}'),
        (NodeInfo, '{"node_rank": 1, "host": "h", "processes": 1, "same": {}, "__class__": 1}'),
        (NodeInfo, '{"node_rank": 1, "host": "h", "processes": 1, "same": {"a": 1}}'),
        (Roster, '{"node_rank": 1, "host_rank": 0, "nodes": [], "addresses": []}'),
        (list[int], "[" * 100_000),
        (int, "1" * 10_000),
        (int, b"\x80\x04\x95"),
    ],
)
def test_what_is_none_is_refused(kind: Any, text: str | bytes) -> None:
    with pytest.raises(MalformedError):
        decode(kind, text, proven=False)


def test_a_chain_without_end_is_refused() -> None:
    start = json.loads(plain.encode(RaisedError, outcome(b"").failure.error.cause, proven=False))  # type: ignore[union-attr]
    deep = dict(start)
    for _ in range(2_000):
        deep = {**start, "cause": deep}
    with pytest.raises(MalformedError):
        plain.load(RaisedError, deep, proven=False)


def test_what_is_read_can_be_passed_on() -> None:
    start = json.loads(plain.encode(RaisedError, outcome(b"").failure.error.cause, proven=False))  # type: ignore[union-attr]
    deep = dict(start)
    for depth in range(400):
        deep = {**start, "cause": deep}
        try:
            found = plain.load(RaisedError, deep, proven=False)
        except MalformedError as error:
            assert depth > 40 and "is nested too deeply" in str(error)
            return
        assert json.loads(plain.encode(RaisedError, found, proven=False)) == deep
    raise AssertionError("a chain of 400 errors was read")


def test_long_texts_of_unproven_peers_are_cut() -> None:
    assert len(plain.encode(str, "x" * 10_000_000, proven=False)) < 1_000_000
    assert len(plain.encode(str, "x" * 10_000_000, proven=True)) > 10_000_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["node", "kind", "failure", "rank", "host", "a"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.binary(max_size=60) | JSON.map(lambda data: json.dumps(data).encode()))
def test_any_bytes_are_a_value_or_refused(kind: Any, data: bytes) -> None:
    try:
        found = decode(kind, data, proven=False)
    except MalformedError:
        return
    again = decode(kind, plain.encode(kind, found, proven=False), proven=False)
    assert again == found or "nan" in repr(found)
