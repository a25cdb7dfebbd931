"""What the thread that fetches weights fetches, where to, and what it keeps."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from notebook_accel.hooks.prefetch import Need, Prefetcher


def test_a_device_without_number_is_the_current_one_of_the_thread_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # that of the new thread would be 0
    asked: list[torch.device] = []

    def find_no_stream(self: Prefetcher, device: torch.device) -> Any:
        asked.append(device)

    monkeypatch.setattr(Prefetcher, "_stream", find_no_stream)
    fetched: list[torch.device | None] = []
    monkeypatch.setattr(Need, "fetch", lambda self, device=None, way=None: fetched.append(device) or {})
    prefetcher = Prefetcher()
    first, second = (
        Need(weights={}, names=(), places=(), device=torch.device("cuda"), nbytes=1) for _ in range(2)
    )
    prefetcher.expect(first)
    prefetcher.expect(second)
    prefetcher.begin()
    prefetcher.take(first)
    prefetcher.take(second)
    prefetcher.end()
    if (thread := prefetcher._thread) is not None:
        thread.join()
    assert set(fetched) == {torch.device("cuda", 1)} and set(asked) <= {torch.device("cuda", 1)}


def test_a_thread_that_is_late_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    may_work = threading.Event()
    work = Prefetcher._work

    def work_late(self: Prefetcher) -> None:
        may_work.wait(60)
        work(self)

    monkeypatch.setattr(Prefetcher, "_work", work_late)
    monkeypatch.setattr(Need, "fetch", lambda self, device=None, way=None: {"x": torch.ones(2)})
    prefetcher = Prefetcher()
    needs = [Need(weights={}, names=(), places=(), device=torch.device("cpu"), nbytes=1) for _ in range(4)]
    for need in needs:
        prefetcher.expect(need)
    prefetcher.begin()
    try:
        taken = [weakref.ref(prefetcher.take(need)["x"]) for need in needs]
        assert [reference() for reference in taken] == [None] * 4
        assert not prefetcher._queue
    finally:
        prefetcher.end()
        thread = prefetcher._thread
        may_work.set()
    if thread is not None:
        thread.join()
