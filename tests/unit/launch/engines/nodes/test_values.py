"""The value of rank 0 on its way to the other nodes."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.errors import ShipError
from notebook_accel.events import Result
from notebook_accel.launch.engines.nodes import values
from notebook_accel.launch.engines.nodes.messages import Message
from notebook_accel.trust.secret import OPEN


def test_a_value_that_cannot_be_written_or_read_is_a_problem_of_the_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(value: Any, limit: float) -> Any:
        raise RuntimeError("it has no bytes")

    with monkeypatch.context() as patch:
        patch.setattr(values, "pack_plain", fail)
        message = values.make_message(Result(rank=0, time=1.0, value=b"", buffers=[]), {0: 1}, OPEN)
    with pytest.raises(ShipError, match=r"^rank 0 is on another node: RuntimeError: it has no bytes$"):
        values.read(message, OPEN)
    with pytest.raises(ShipError, match=r"^rank 0 is on another node: a returned value cannot be read"):
        values.read(Message("value", (1.0, ""), [b"no value"]), OPEN)
