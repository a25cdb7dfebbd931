"""Which device the thread that fetches weights fetches them to."""

from __future__ import annotations

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
    monkeypatch.setattr(Need, "fetch", lambda self, device=None: fetched.append(device) or {})
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
