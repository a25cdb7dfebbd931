"""What programs write that is no text: garbage, half characters, lines of megabytes, and streams that are closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scripts import SEED, run

WRITE = f"""
import random

def write(stream, data):
    while data:
        data = data[os.write(stream, data):]

def speak():
    rank = int(os.environ["RANK"])
    chooser = random.Random({SEED} + rank)
    for stream in (1, 2):
        write(stream, bytes(range(256)) * 4 + b"\\n")
        write(stream, chooser.randbytes(100_000) + b"\\n")
        write(stream, b"\\x1b[2J\\x1b[9999999999A\\x1b[" + b"7" * 5000 + b"A\\r\\r\\x00\\n")
        write(stream, b"x" * 5_000_000 + b"\\n")
        write(stream, b"\\r" * 300_000 + b"\\n")
        write(stream, "\\u00e9".encode()[:1])  # half of a character, the other half comes later
        time.sleep(0.02)
        write(stream, "\\u00e9".encode()[1:] + b"nd\\n")
        write(stream, b"half at the end: " + "\\u20ac".encode()[:2])
    return rank
"""


def test_garbage(tmp_path: Path) -> None:
    code = """
run = notebook_launcher(speak, num_processes=2, returns="all", output="none", view="none", log_dir="logs", block=False)
print("value", run.result())
for rank in (0, 1):
    kept = run.lines(rank)
    assert kept.count("\\u00e9nd") == 2, "half characters are joined"
    assert sum(line.startswith("half at the end: \\\\xe2\\\\x82") for line in kept) == 2
    assert sum(len(line) for line in kept if len(line) > 1 << 10 and set(line) == {"x"}) == 10_000_000
    assert max(map(len, kept)) <= 1 << 20
    log = open(f"logs/rank_{rank}.log", encoding="utf-8", newline="\\n").read()
    assert log.count("x" * (1 << 20)) >= 2 * 4 and log.count("\\u00e9nd") == 2
with Session(2, start_method="fork") as session:
    print("session", session.run(speak, returns="all"))
"""
    out = run(f"print('seed {SEED}')\n{WRITE}{code}", tmp_path)
    assert "value [0, 1]" in out and "session [0, 1]" in out, out[-2000:]


def test_garbage_of_a_script(tmp_path: Path) -> None:
    """Here the launcher's own output is a pipe, and its lines are those of the script."""
    (tmp_path / "train.py").write_text(f"import os, sys, time\n{WRITE}\nspeak()\n")
    out = run(
        """
        done = subprocess.run(
            [sys.executable, "-m", "notebook_accel", "launch", "--cpu", "--num_processes", "2", "train.py"],
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        for stream in (done.stdout, done.stderr):
            text = stream.decode("utf-8")
            assert text.count("\\u00e9nd") == 2 and text.count("half at the end") == 2
            assert sum(line.count("x") for line in text.split("\\n") if "x" * 1000 in line) >= 10_000_000
        print("whole")
        """,
        tmp_path,
    )
    assert "whole" in out


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_a_notebook_without_standard_streams(tmp_path: Path, method: str) -> None:
    """Descriptors 0, 1 and 2 are closed, and the next files that are opened get these numbers."""
    out = run(
        f"""
        told = os.dup(1)
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        sys.stdout = sys.stderr = sys.stdin = None
        def value():
            print("to nobody")
            os.write(2, b"to nobody\\n")
            subprocess.run(["true"], check=True)
            return int(os.environ["RANK"])
        options = dict(returns="all", start_method={method!r})
        found = [notebook_launcher(value, num_processes=2, **options)]
        def fail():
            raise ValueError("on purpose")
        try:
            notebook_launcher(fail, num_processes=2, start_method={method!r})
        except ValueError as error:
            found.append(str(error))
        with Session(2, start_method={method!r}) as session:
            found.append(session.run(value, returns="all"))
        os.write(told, (str(found) + "\\n").encode())
        """,
        tmp_path,
    )
    assert out.splitlines()[-1] == "[[0, 1], 'on purpose', [0, 1]]", out
