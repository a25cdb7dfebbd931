"""Sizes of devices, as libraries compute them."""

from __future__ import annotations

import math

import pytest

from notebook_accel.big_modeling.limits import convert_file_size_to_int, get_max_memory


def test_sizes_may_be_fractions_of_a_byte() -> None:
    assert convert_file_size_to_int(0.9 * 1001) == 900
    assert get_max_memory({"cpu": 1e9}) == {"cpu": 10**9}


@pytest.mark.parametrize("size", [-1.5, math.nan, math.inf, True, None])
def test_other_sizes_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match="size"):
        convert_file_size_to_int(size)  # type: ignore[arg-type]
