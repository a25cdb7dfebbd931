"""What counts as the number of a step."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel.tracking.values import read_step


@pytest.mark.parametrize(
    "step",
    [
        2,
        2.0,
        np.int64(2),
        np.float32(2.0),
        np.array([2]),
        torch.tensor(2),
        torch.tensor([2.0]),
        Decimal(2),
        Fraction(2),
        "2",
    ],
    ids=repr,
)
def test_whole_numbers_of_any_type_are_steps(step: Any) -> None:
    found = read_step(step)
    assert found == 2 and type(found) is int


@pytest.mark.parametrize(
    "step",
    [
        0.5,
        -0.5,
        1e-300,
        np.float64(2.5),
        np.array([0.5], dtype=np.float16),
        torch.tensor(0.5),
        Decimal("0.5"),
        Fraction(1, 2),
        float("nan"),
        float("inf"),
        "a",
        "0.5",
    ],
    ids=repr,
)
def test_what_is_no_whole_number_is_refused_and_not_cut_off(step: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"step={step!r}: a whole number is needed")):
        read_step(step)


def test_large_steps_are_exact() -> None:
    assert read_step(2**63 + 1) == 2**63 + 1 and read_step(None) is None
