"""The ranks of the tests: what is told about those that do not answer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit import multiprocess
from tests.unit.clock import wait_until
from tests.unit.multiprocess import NoAnswer, run_ranks


def linger_on_rank_one(mark: Path) -> None:
    if os.environ["RANK"] == "1":
        mark.touch()
        time.sleep(600)


def test_where_a_rank_was_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(os.getpid)  # the fork server has torch loaded then
    mark, wait = tmp_path / "lingers", multiprocess.wait

    def wait_for_rank_one(pending: Any, timeout: float) -> Any:
        """Let the time run out once rank 0 has answered and rank 1 is where it lingers, however late that is."""
        if len(pending) == 2:
            return wait(pending)
        wait_until(mark.exists)
        return wait(pending, timeout)

    monkeypatch.setattr(multiprocess, "wait", wait_for_rank_one)
    with pytest.raises(NoAnswer, match=r"(?s)ranks \[1\] within 1 s.*rank 1:.*in linger_on_rank_one"):
        run_ranks(linger_on_rank_one, mark, timeout=1)
