"""What joins workers that are being started with this process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from notebook_accel import runtime
from notebook_accel.launch.supervise import starting

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lists the descriptors of a process"
)
CONTEXT = multiprocessing.get_context("fork")


def list_open() -> set[int]:
    names = os.listdir("/proc/self/fd")  # that of the list itself is closed by now
    return {int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")}


@pytest.fixture
def group() -> Iterator[starting.Starting]:
    before = list_open()
    made = starting.Starting()
    yield made
    made.end(())
    assert list_open() == before and made not in runtime.owners()


def test_a_worker_keeps_its_own_ends_and_other_processes_none(group: starting.Starting) -> None:
    first, second = group.join(CONTEXT), group.join(CONTEXT)
    everything = {*first.filenos(with_theirs=True), *second.filenos(with_theirs=True)}
    own = everything - {*first.filenos(with_theirs=False), *second.filenos(with_theirs=True)}
    assert len(everything) == 16 and len(own) == 4
    assert set(group.filenos()) == everything
    group.begins = first
    assert set(group.filenos()) == everything - own
    found: list[int] = []
    other = threading.Thread(target=lambda: found.extend(group.filenos()))
    other.start()
    other.join()
    assert set(found) == everything, "what another thread forks is no worker"


def test_of_those_that_have_begun_our_ends_stay_open(group: starting.Starting) -> None:
    begun, other = group.join(CONTEXT), group.join(CONTEXT)
    ours = set(begun.filenos(with_theirs=False))
    closed = {*begun.filenos(with_theirs=True), *other.filenos(with_theirs=True)} - ours
    group.end([begun])
    assert ours <= list_open() and not closed & list_open()
    assert set(begun.filenos(with_theirs=True)) == ours


def test_nothing_stays_open_of_one_that_cannot_be_made(
    group: starting.Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, calls = list_open(), 0

    def fail(duplex: bool) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(24, "Too many open files")
        return CONTEXT.Pipe(duplex)

    monkeypatch.setattr(starting, "OUTPUT_BY_PIPES", True)
    with monkeypatch.context() as patch:
        context = multiprocessing.get_context("spawn")
        patch.setattr(context, "Pipe", fail, raising=False)
        with pytest.raises(OSError, match="Too many"):
            group.join(context)
    assert list_open() == before and group.filenos() == []
