"""In a worker: sends output as events where a process cannot pass descriptors to another (Windows)."""

from __future__ import annotations

import os
import threading
import time

from ..events import Chunk, Stream
from .emit import Emitter
from .readable import count_unread_bytes

_CHUNK = 1 << 16


class Pump:
    """Makes a descriptor the end of a pipe in this process, and sends everything that is written to it.

    If the worker is killed, what is still in the pipe is lost.

    Args:
        emitter: sends the output.
        stream: name of the stream.
        fd: the descriptor.
    """

    def __init__(self, emitter: Emitter, stream: Stream, fd: int) -> None:
        self._emitter = emitter
        self._stream = stream
        self._read_end, write_end = os.pipe()
        os.dup2(write_end, fd)
        os.close(write_end)
        self._sending = threading.Lock()
        self._num_read = self._num_sent = 0  # bytes
        threading.Thread(target=self._run, daemon=True).start()

    def drain(self, seconds: float) -> None:
        """Wait until everything has been sent that was written before; others may go on writing.

        Args:
            seconds: to wait at most.
        """
        deadline = time.monotonic() + seconds
        unread = count_unread_bytes(self._read_end)
        time.sleep(0.001)  # between reading and counting
        end = self._num_read + unread
        while self._num_sent < end and count_unread_bytes(self._read_end) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.001)  # between reading and sending
        if self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._sending.release()

    def _run(self) -> None:
        emitter = self._emitter
        while data := os.read(self._read_end, _CHUNK):
            with self._sending:
                self._num_read += len(data)
                emitter.emit(Chunk(rank=emitter.rank, time=emitter.now(), stream=self._stream, data=data))
                self._num_sent += len(data)
