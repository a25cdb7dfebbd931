"""A cable between two network namespaces that delays what it carries and loses some of it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import selectors
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

_DEVICE: Final = "/dev/net/tun"
_SET_INTERFACE: Final = 0x400454CA  # TUNSETIFF, see linux/if_tun.h
_TAP_WITHOUT_HEADER: Final = 0x0002 | 0x1000
_FRAME: Final = 1 << 16


def can_be() -> bool:
    """Whether this machine has the device that such cables are made of."""
    return Path(_DEVICE).exists()


class SlowWire:
    """Two interfaces of this process's namespace, which may be moved to others, and a thread between them.

    Every frame arrives `delay` seconds later, in order, or with the probability `loss` never.
    """

    def __init__(self, names: tuple[str, str], delay: float, loss: float) -> None:
        self.names = names
        self.lost = self.carried = 0
        self._delay, self._loss = delay, loss
        self._ends = [_interface(name) for name in names]
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        """Remove both interfaces."""
        os.close(self._stop)
        self._thread.join()
        for descriptor in (*self._ends, self._wake):
            os.close(descriptor)

    def _carry(self) -> None:
        chance = random.Random(0)
        waiting: deque[tuple[float, int, bytes]] = (
            deque()
        )  # the delay is one for all: they leave as they came
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._ends, self._wake):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select(_until(waiting))]
                if self._wake in ready:
                    return
                for end in ready:
                    frame = os.read(end, _FRAME)
                    if chance.random() < self._loss:
                        self.lost += 1
                    else:
                        other = self._ends[1 - self._ends.index(end)]
                        waiting.append((time.monotonic() + self._delay, other, frame))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, end, frame = waiting.popleft()
                    self._deliver(end, frame)

    def _deliver(self, end: int, frame: bytes) -> None:
        try:
            os.write(end, frame)
            self.carried += 1
        except OSError as error:
            if error.errno != errno.EIO:  # the interface is down
                raise
            self.lost += 1


def _until(waiting: deque[tuple[float, int, bytes]]) -> float | None:
    return max(0.0, waiting[0][0] - time.monotonic()) if waiting else None


def _interface(name: str) -> int:
    """Make an interface; return the descriptor at which its frames come out and go in."""
    descriptor = os.open(_DEVICE, os.O_RDWR)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return descriptor
