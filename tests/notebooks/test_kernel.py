"""The kernels of tests."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import KernelManager

from tests.notebooks.kernel import Kernel


def test_nobody_takes_the_ports_of_a_kernel_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = KernelManager.start_kernel
    taken = []

    def take_ports(manager: KernelManager, **arguments: Any) -> None:
        for port in manager.ports:
            with socket.socket() as other, pytest.raises(OSError) as caught:
                other.bind(("127.0.0.1", port))
            taken.append(caught.value.errno)
        start(manager, **arguments)

    monkeypatch.setattr(KernelManager, "start_kernel", take_ports)
    kernel = Kernel(tmp_path, is_copy=True)
    ports = kernel.manager.ports
    try:
        assert taken == [errno.EADDRINUSE] * 5
        kernel.restart(now=True)
        assert kernel.run("6 * 7").value == "42" and kernel.manager.ports == ports
    finally:
        kernel.close()
