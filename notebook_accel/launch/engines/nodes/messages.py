"""Messages between the nodes of a run: a kind, a value, and bytes that are not copied, over one connection.

A value is data of the type that belongs to its kind. What a node says has no power over the code of another one.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from ....events import Buffer, as_bytes
from ....trust import plain
from ....trust.plain import MalformedError
from ....trust.proof import REPLY_BYTES, Session
from ...supervise.stop_agreement import Questions
from .node_info import NodeInfo, Roster
from .outcomes import NodeOutcome, RestartCause

_HEAD: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
_MAX_PARTS: Final = 1 << 20
PIECE_BYTES: Final = 1 << 20

MessageKind = Literal[
    # from a node
    "node",  # I am ready for this attempt: (NodeInfo, attempt)
    "outcome",  # my part has ended: NodeOutcome; one that has ended well may be called again
    "held",  # my ranks are held: Questions
    # from a node, passed on to all others
    "cause",  # why my workers start again: RestartCause
    "value",  # what rank 0 returned: time of the result, why it cannot travel, or empty; and the value as parts
    "news",  # something was heard of my ranks
    "ask",  # my ranks are silent, and I ask them where they are
    "stop",  # the ranks are to stop at one question: I hold mine
    # from the coordinator
    "present",  # these nodes are here, others are not: list of NodeInfo
    "roster",  # all are here: Roster
    "turned away",  # a node does not fit to the run: a sentence, for the cell of the node with the coordinator
    "refused",  # you cannot take part: why
    "over",  # the run has ended
    "again",  # another node starts its workers again, or is waited for: number of the attempt; whom, or empty
    "agreed",  # the ranks of all nodes are held: Questions
    "trouble",  # another node failed
    "verdict",  # why the run ended: NodeOutcome, or None for well
]


_TYPES: Final[Mapping[MessageKind, Any]] = {
    "node": tuple[NodeInfo, int],
    "outcome": NodeOutcome,
    "value": tuple[float, str],
    "cause": RestartCause,
    "news": None,
    "ask": None,
    "stop": None,
    "held": Questions,
    "turned away": str,
    "present": list[NodeInfo],
    "roster": Roster,
    "refused": str,
    "over": None,
    "again": tuple[int, str],
    "agreed": Questions,
    "trouble": None,
    "verdict": NodeOutcome | None,
}


class Message(NamedTuple):
    """What nodes and the coordinator tell each other.

    Attributes:
        kind: what it is about.
        value: what belongs to the kind; `_TYPES` says of which type it is.
        parts: bytes that are sent as they are.
    """

    kind: MessageKind
    value: Any = None
    parts: Sequence[Buffer] = ()


class Limit(NamedTuple):
    """How many bytes a peer may say in a message.

    Attributes:
        value: of the value.
        parts: of all parts together.
    """

    value: float
    parts: float


NO_LIMIT: Final = Limit(math.inf, math.inf)
MEMBER_LIMIT: Final = Limit(1 << 24, 1 << 30)
"""Of a run without a secret: nobody knows who it is that says so much."""
GUEST_LIMIT: Final = Limit(1 << 20, 0)


BEAT: Final = bytes(_HEAD.size)
"""What is sent where nothing else is: a message of no parts."""


def encode(message: Message, session: Session | None) -> Iterator[Buffer]:
    """Yield the bytes of a message, in pieces that are not copied, each of which takes no time to send.

    Args:
        message: what to say.
        session: of a connection whose ends have proven a secret, else None.
    """
    value = plain.encode(_TYPES[message.kind], message.value, proven=session is not None)
    first = f'["{message.kind}", {value}]'.encode()
    views = [as_bytes(part) for part in (first, *message.parts)]
    head = _HEAD.pack(len(views)) + b"".join(_SIZE.pack(view.nbytes) for view in views)
    tag = None if session is None else session.outgoing.begin()
    for view in (memoryview(head), *views):
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            if tag is not None:
                tag.update(piece)
            yield piece
    if tag is not None:
        yield tag.digest()


def read(
    take: Callable[[int], Buffer], session: Session | None, limit: Callable[[], Limit]
) -> Message | None:
    """Read what comes next; None for a beat, which only says that the peer is there.

    Args:
        take: waits for so many bytes and returns them.
        session: of a connection whose ends have proven a secret, else None.
        limit: returns how much the peer may say now.

    Raises:
        MalformedError: the bytes are no message.
        ProofError: another one than the peer has sent them.
    """
    head = bytearray(take(_HEAD.size))
    (count,) = _HEAD.unpack(head)
    if not count:
        return None
    most = limit()
    if count > (_MAX_PARTS if most.parts else 1):
        raise MalformedError(f"a message has {count} parts")
    head += take(_SIZE.size * count)
    sizes = [size for (size,) in _SIZE.iter_unpack(head[_HEAD.size :])]
    if sizes[0] > most.value or sum(sizes[1:]) > most.parts:
        raise MalformedError(f"a message of {sum(sizes)} bytes is too long")
    parts = [take(size) for size in sizes]
    if session is not None:
        session.incoming.check_tag(bytes(take(REPLY_BYTES)), [head, *(memoryview(part) for part in parts)])
    return _decode(parts, proven=session is not None)


def _decode(parts: Sequence[Buffer], *, proven: bool) -> Message:
    try:
        kind, value = json.loads(bytes(parts[0]))
        expected = _TYPES[kind]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedError(f"a message cannot be read: {error}") from None
    if len(parts) > 1 and kind != "value":
        raise MalformedError(f"a message {kind!r} has no parts besides")
    return Message(kind, plain.load(expected, value, proven=proven), parts[1:])
