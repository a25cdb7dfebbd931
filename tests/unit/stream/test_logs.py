"""Files with the output of ranks."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from notebook_accel.events import Lines
from notebook_accel.stream.logs import LogFiles


def test_others_do_not_read_the_output_of_a_run(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = LogFiles(tmp_path / "logs", "train")
        files.show([Lines(rank=0, time=1.0, stream="stdout", texts=("a token",))])
        files.close()
    finally:
        os.umask(before)
    (path,) = (tmp_path / "logs").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "a token" in path.read_text()


def test_a_slow_reader_of_a_pipe_gets_all(tmp_path: Path) -> None:
    fifo = tmp_path / "rank_0.log"
    os.mkfifo(fifo)
    got: list[bytes] = []

    def read() -> None:
        while data := os.read(reading, 1000):
            got.append(data)

    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    files = LogFiles(tmp_path, "train")
    files.show(
        [Lines(rank=0, time=1.0, stream="stdout", texts=("begin",))]
    )  # the pipe has a writer from here on
    reader = threading.Thread(target=read)
    reader.start()
    files.show([Lines(rank=0, time=1.0, stream="stdout", texts=("x" * 1_000_000,))])
    files.close()
    reader.join()
    os.close(reading)
    assert b"".join(got).count(b"x") == 1_000_000
