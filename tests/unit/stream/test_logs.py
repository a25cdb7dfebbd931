"""Files with the output of ranks."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from notebook_accel.events import Line
from notebook_accel.stream.logs import LogFiles


@pytest.mark.skipif(sys.platform == "win32", reason="files of Windows have no such modes")
def test_others_do_not_read_the_output_of_a_run(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = LogFiles(tmp_path / "logs", "train")
        files.show([Line(rank=0, time=1.0, stream="stdout", text="a token")])
        files.close()
    finally:
        os.umask(before)
    (path,) = (tmp_path / "logs").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "a token" in path.read_text()
