"""The ranks of the tests: what is told about those that do not answer."""

from __future__ import annotations

import os
import time

import pytest

from tests.unit.multiprocess import NoAnswer, run_ranks


def linger_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(600)


def test_where_a_rank_was_is_told() -> None:
    run_ranks(os.getpid)  # the fork server has torch loaded then
    with pytest.raises(NoAnswer, match=r"(?s)ranks \[1\] within 4 s.*rank 1:.*in linger_on_rank_one"):
        run_ranks(linger_on_rank_one, timeout=4)
