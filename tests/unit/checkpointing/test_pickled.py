"""Files of torch.save that several threads and processes write."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel.checkpointing import pickled


class Slow:
    """What is being pickled until a test says so."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        self.begun.set()
        self.go.wait()
        return int, ()


def test_a_fork_writes_also_where_a_thread_was_writing(tmp_path: Path) -> None:
    slow = Slow()
    thread = threading.Thread(target=pickled.write, args=(tmp_path / "slow", slow))
    thread.start()
    slow.begun.wait()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            pickled.write(tmp_path / "forked", {"one": 1})
            os._exit(0 if torch.serialization.get_crc32_options() else 2)
        finally:
            os._exit(1)
    try:
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        slow.go.set()
        thread.join()
    assert pickled.read(tmp_path / "forked") == {"one": 1}


@pytest.mark.parametrize("size", [10, 20_000_000])
def test_a_full_disk_is_told_as_the_system_says_it(size: int) -> None:
    """Not as torch's zip writer says it, which finds a wrong position in the file."""
    with pytest.raises(OSError, match="No space left on device"):
        pickled.write(Path("/dev/full"), torch.ones(size))
