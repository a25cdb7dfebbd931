"""pandas and pyarrow in the process that is forked, whose allocator has a thread of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure.source import ROOT

PROGRAM = """
import pandas, pyarrow, torch
from notebook_accel import notebook_launcher

table = pyarrow.table({"key": list(range(7)) * 1000, "text": [str(i) for i in range(7000)]})

def count():
    frame = pyarrow.Table.from_pandas(table.to_pandas()).to_pandas()
    torch.set_num_threads(2)
    (torch.randn(300, 300, requires_grad=True) @ torch.randn(300, 300)).sum().backward()
    return int(frame.groupby("key").text.count().sum())

print("counted", notebook_launcher(count, num_processes=2, start_method="fork", returns="all"))
"""


@pytest.mark.parametrize("pool", ["jemalloc", "mimalloc"])
def test_workers_are_forked_after_an_import_of_pandas(tmp_path: Path, pool: str) -> None:
    pytest.importorskip("pyarrow")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ARROW_DEFAULT_MEMORY_POOL": pool},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "counted [7000, 7000]" in done.stdout, done.stdout + done.stderr
