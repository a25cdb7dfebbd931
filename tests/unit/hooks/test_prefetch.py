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


class Files(Weights):
    """Weights of files, as far as the prefetcher knows them; notes what is asked, and by which thread."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    def note(self, what: str, names: Sequence[str]) -> None:
        self.asked.append((what, " ".join(names), threading.get_ident()))

    def announce(self, names: Sequence[str]) -> bool:
        self.note("announce", names)
        return True

    def get_many(self, names: Sequence[str], *, aligned: bool = True) -> dict[str, torch.Tensor]:
        self.note("read", names)
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
    needs = [
        Need(
            weights=weights,
            names=(name,),
            places=(torch.empty(2, device="meta"),),
            device=torch.device("cpu"),
            nbytes=8,
        )
        for name in ("x", "y")
    ]
    for need in needs:
        prefetcher.expect(need)
    prefetcher.begin()
    thread = prefetcher._thread
    for need in needs:
        assert prefetcher.take(need)[need.names[0]].sum() == 2
    prefetcher.end()
    if thread is not None:
        thread.join()
    return int(thread is not None)


def test_on_the_cpu_the_system_reads_files_ahead_and_the_computing_thread_copies() -> None:
    files = Files()
    assert take_two(PrefixedDataset(files, "block.")) == 0
    here = threading.get_ident()
    assert files.asked == [
        ("announce", "block.x", here),
        ("read", "block.x", here),
        ("announce", "block.y", here),
        ("read", "block.y", here),
    ]


def test_a_mapping_of_other_kind_is_read_by_the_thread_on_the_cpu_too() -> None:
    assert take_two(PrefixedDataset({"x": torch.ones(2), "y": torch.ones(2)}, "")) == 1
