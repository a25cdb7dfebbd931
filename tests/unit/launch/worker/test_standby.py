"""What the process that stands by does when it is taken, or when its notebook ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from notebook_accel.launch.supervise.standby import _describe_limits
from notebook_accel.launch.worker import standby

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing stands by on Windows")
CODE = "from notebook_accel.launch.worker import standby; standby._WARM = 'os'; standby.stand_by({fd}, False)"


@contextmanager
def standing_by() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            code = CODE.format(fd=theirs.fileno())
            process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        try:
            yield process, ours
        finally:
            ours.close()
            process.wait(60)


def test_it_ends_with_its_notebook() -> None:
    with standing_by() as (process, ours):
        ours.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("first", [b"", standby.LOAD], ids=["at once", "after the compiler"])
def test_it_runs_what_it_gets_with_the_descriptors_by_their_numbers(first: bytes) -> None:
    reader, writer = os.pipe()
    other, last = os.pipe()
    code = (
        "import os, sys; os.write({0}, b'first'); os.write({1}, b'second'); os.write({0}, __name__.encode()); "
        "os.write({0}, ' '.join(sys.argv).encode()); "
        "os.write({0}, os.readlink('/proc/self/fd/1').encode() if sys.platform == 'linux' else b'/dev/null')"
    )
    try:
        with standing_by() as (process, ours):
            if first:
                ours.sendall(first)
            numbers = [1000, 3]  # the second is likely to be in use there
            socket.send_fds(ours, [standby.SERVE], [writer, last])
            order = {"words": [code.format(*numbers), "a", "b"], "fds": numbers, **_describe_limits()}
            ours.sendall(json.dumps(order).encode())
            ours.shutdown(socket.SHUT_WR)
            assert process.wait(120) == 0
        assert os.read(reader, 100) == b"first__main__-c a b/dev/null"
        assert os.read(other, 100) == b"second"
    finally:
        for fd in (reader, writer, other, last):
            os.close(fd)


def test_a_default_device_is_set_back_and_not_started() -> None:
    code = (
        "import torch; from notebook_accel.launch.worker import standby\n"
        "torch.cuda._lazy_init = lambda: print('started')\n"
        "torch.set_default_device('cuda'); standby._set_defaults()\n"
        "print(torch.ones(1).device, torch.get_default_device())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["cpu", "cpu"], done.stderr
