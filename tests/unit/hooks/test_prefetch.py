"""What the thread that fetches weights fetches, where to, and what it keeps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from notebook_accel.hooks.prefetch import Need, Prefetcher
from notebook_accel.hooks.weights import PrefixedDataset, Weights


def test_a_device_without_number_is_the_current_one_of_the_thread_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # that of the new thread would be 0
    asked: list[torch.device] = []

    def find_no_stream(self: Prefetcher, device: torch.device) -> Any:
        asked.append(device)

    monkeypatch.setattr(Prefetcher, "_stream", find_no_stream)
    fetched: list[torch.device | None] = []
    monkeypatch.setattr(
        Need, "fetch", lambda self, device=None, way=None, beside=False: fetched.append(device) or {}
    )
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
    monkeypatch.setattr(Need, "fetch", lambda self, device=None, way=None, beside=False: {"x": torch.ones(2)})
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


class Files(Weights):
    """Weights of files, as far as the prefetcher knows them; notes what is read, and whether by a thread.

    Args:
        is_cached: whether the system has them in its cache.
    """

    def __init__(self, is_cached: bool) -> None:
        self.is_cached = is_cached
        self.read: list[tuple[str, bool]] = []

    def is_near(self, names: Sequence[str]) -> bool:
        return self.is_cached

    def get_many(
        self, names: Sequence[str], *, aligned: bool = True, beside: bool = False
    ) -> dict[str, torch.Tensor]:
        assert beside == (threading.current_thread() is not threading.main_thread())
        self.read.append((" ".join(names), beside))
        return {name: torch.ones(2) for name in names}

    def check(self, names: Sequence[str]) -> None:
        """Nothing changes."""

    def get_lasting(self, name: str) -> torch.Tensor:
        return torch.ones(2)

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.ones(2)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def take_two(weights: Any) -> int:
    """Let two modules on the CPU compute with weights of such a mapping; return the number of threads started."""
    prefetcher = Prefetcher()
    places = (torch.empty(2, device="meta"),)
    first, second = (
        Need(weights=weights, names=(name,), places=places, device=torch.device("cpu"), nbytes=8)
        for name in ("x", "y")
    )
    prefetcher.expect(first)
    prefetcher.expect(second)
    work, started = prefetcher._work, []

    def count_and_work() -> None:
        started.append(threading.current_thread())
        work()

    prefetcher._work = count_and_work  # type: ignore[method-assign]
    prefetcher.begin()
    for need in (first, second):
        if (thread := prefetcher._thread) is not None:
            thread.join()
        assert prefetcher.take(need)[need.names[0]].sum() == 2
    prefetcher.end()
    return len(started)


def test_on_the_cpu_no_thread_fetches_what_the_system_has_in_its_cache() -> None:
    files = Files(is_cached=True)
    assert take_two(PrefixedDataset(files, "block.")) == 0
    assert files.read == [("block.x", False), ("block.y", False)]


def test_on_the_cpu_a_thread_fetches_what_comes_from_a_disk() -> None:
    files = Files(is_cached=False)
    assert take_two(PrefixedDataset(files, "block.")) == 2
    assert files.read == [("block.x", True), ("block.y", True)]


def test_a_mapping_of_other_kind_is_read_by_the_thread_on_the_cpu_too() -> None:
    assert take_two(PrefixedDataset({"x": torch.ones(2), "y": torch.ones(2)}, "")) == 2
