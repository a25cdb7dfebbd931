"""How a worker's process ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel.launch.worker import main


@pytest.mark.parametrize(
    ("asked", "code", "printed"),
    [
        (3, 3, ""),
        (-1, 255, ""),
        ("no data", 1, "no data\n"),
        (torch.ones(2), 1, "tensor([1., 1.])\n"),
        (0.0, 1, "0.0\n"),
    ],
    ids=str,
)
def test_what_an_exit_asks_for(
    asked: Any, code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None  # a failing exit has no result to send
    assert main._handle_exit(SystemExit(asked), nothing, nothing) == code
    assert capsys.readouterr().err == printed
