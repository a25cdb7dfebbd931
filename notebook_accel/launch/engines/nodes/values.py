"""The value of rank 0 on its way to the other nodes: its pickle where they prove a secret, else data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import ShipError
from ....events import Result
from ....trust.plain import MalformedError
from ....trust.secret import Trust
from ...transfer import failures
from ...transfer.plain_values import pack_plain, unpack_plain
from ...transfer.unpicklable import unpack_value
from .messages import MEMBER_LIMIT, Message


def make_message(result: Result, values: Mapping[int, Any], trust: Trust) -> Message:
    """Return the message with rank 0's value, or with the reason why it cannot travel.

    Args:
        result: of rank 0, with its value as a pickle.
        values: by rank, made from their pickles.
        trust: whether nodes prove a secret.
    """
    if trust.is_proven:
        return Message("value", (result.time, ""), [result.value, *result.buffers])
    try:
        return Message("value", (result.time, ""), [pack_plain(values[0], MEMBER_LIMIT.parts)])
    except ShipError as error:
        return Message("value", (result.time, str(error)))
    except Exception as error:  # the other nodes wait for an answer
        return Message("value", (result.time, failures.describe_error(error)))


def read(message: Message, trust: Trust) -> Any:
    """Return rank 0's value.

    Args:
        message: from `make_message` on another node.
        trust: whether nodes prove a secret.

    Raises:
        ShipError: the value did not come.
    """
    time, problem = message.value
    if problem:
        raise ShipError(f"rank 0 is on another node: {problem}")
    value, *buffers = message.parts
    if not trust.is_proven:
        try:
            return unpack_plain(value)
        except MalformedError as error:
            raise ShipError(f"rank 0 is on another node: {error}") from None
    return unpack_value(Result(rank=0, time=time, value=bytes(value), buffers=buffers))
