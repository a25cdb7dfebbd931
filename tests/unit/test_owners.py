"""Whether a process that owns something has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from notebook_accel import owners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")


def test_an_owner_has_ended_although_nobody_has_waited_for_it() -> None:
    process = subprocess.Popen(["sleep", "300"])
    owner = owners.find(process.pid)
    assert owner is not None
    with process:
        assert not owner.has_ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner.has_ended(), "it is a zombie"
    assert owner.has_ended()
    ours = owners.find(os.getpid())
    assert ours is not None and not ours.has_ended()
    assert owners.Owner(ours.machine, ours.pid, ours.start + 1).has_ended(), "the number is another's"


def test_a_name_carries_an_owner_of_this_machine() -> None:
    ours = owners.find(os.getpid())
    assert ours is not None
    assert owners.find_in(f"some-1.saving-{owners.describe_own()}-12345678") == ours
    other = f"{int(ours.machine, 16) ^ 1:08x}-{ours.pid}-{ours.start}"
    assert owners.find_in(f"accel-{other}") is None and owners.find_in("accel-12345678") is None
