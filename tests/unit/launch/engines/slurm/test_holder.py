"""What a job runs itself: it lasts as long as an agent does."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_accel.launch.engines.slurm import holder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


def start(name: str, patience: float, grace: float) -> subprocess.Popen[bytes]:
    text = Path(holder.__file__).read_text()
    return subprocess.Popen([sys.executable, "-I", "-c", text, name, str(patience), str(grace)])


def test_it_ends_where_nobody_comes() -> None:
    assert start(secrets.token_hex(8), 0.1, 0.1).wait(60) == 0


def test_it_lasts_as_long_as_an_agent_does() -> None:
    name = secrets.token_hex(8)
    process = start(name, 60.0, 0.1)
    agent = socket.socket(socket.AF_UNIX)
    try:
        while agent.connect_ex(f"\0{name}"):
            assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        agent.close()
    assert process.wait(60) == 0
