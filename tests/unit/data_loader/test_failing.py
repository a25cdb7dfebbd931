"""What is left of a loader whose loop ended early: nothing, also while somebody keeps the error, as a notebook does."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.popen_fork
import multiprocessing.queues
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as torch_loader

from notebook_accel.data_loader import failing, prepare_data_loader
from notebook_accel.gradient_state import GradientState
from tests.unit.clock import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("clean_runtime")


def test_a_loop_that_is_left_keeps_no_loader() -> None:
    """Its batches may be large: no garbage collection is needed to free them."""
    loader = prepare_data_loader(DataLoader(list(range(16)), batch_size=4))
    assert isinstance(loader.gradient_state, GradientState)
    for _ in loader:
        break
    found = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert found() is None
    finally:
        gc.enable()


def open_descriptors() -> int:
    """Return how many descriptors are open once loader processes and threads that feed queues have ended."""
    wait_until(lambda: not multiprocessing.active_children())
    wait_until(lambda: not any("QueueFeeder" in thread.name for thread in threading.enumerate()))
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def loader() -> Iterator[Any]:
    """A loader with two processes, which has been iterated once: that opens what multiprocessing keeps."""
    prepared = prepare_data_loader(
        DataLoader(list(range(16)), batch_size=4, num_workers=2, multiprocessing_context="fork")
    )
    assert len(list(prepared)) == 4
    gc.collect()  # what earlier tests have left
    before = open_descriptors()
    yield prepared
    assert open_descriptors() == before
    assert len(list(prepared)) == 4


LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts this process's descriptors")
SIGNALS = pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")


@LINUX
@SIGNALS
def test_an_interrupt_while_loader_processes_start_leaves_no_pipe(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch_loader._MultiProcessingDataLoaderIter, "_try_put_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))


@LINUX
@SIGNALS
def test_an_error_that_is_kept_keeps_no_pipe(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interrupt while a batch is waited for, as most are."""

    def interrupt(self: Any, timeout: float = 0.0) -> None:
        raise KeyboardInterrupt

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(torch_loader._MultiProcessingDataLoaderIter, "_try_get_data", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            next(iter(loader))
    assert open_descriptors() == before
    assert "_drawn_batches" in str(kept.getrepr()), "the lines stay"


@LINUX
@SIGNALS
def test_an_interrupt_in_the_end_of_an_epoch_leaves_no_pipe(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_the_end(patch)
        with pytest.raises(KeyboardInterrupt):
            for _ in loader:
                pass


@LINUX
@SIGNALS
def test_an_interrupt_of_a_loop_that_is_being_left_is_not_lost(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_the_end(patch)
        with pytest.raises(KeyboardInterrupt):
            for _ in loader:
                break
            time.sleep(600)


def interrupt_the_end(patch: pytest.MonkeyPatch) -> None:
    """Interrupt torch where it has told the first of the loader processes to end."""
    kind = torch_loader._MultiProcessingDataLoaderIter
    tell = kind._mark_worker_as_unavailable
    told: list[int] = []

    def tell_and_interrupt(self: Any, worker_id: int, shutdown: bool = False) -> None:
        tell(self, worker_id, shutdown)
        told.append(worker_id)
        if len(told) == 1:
            signal.raise_signal(signal.SIGINT)

    patch.setattr(kind, "_mark_worker_as_unavailable", tell_and_interrupt)


@LINUX
@SIGNALS
@pytest.mark.parametrize("is_slow", [False, True], ids=["at once", "after its connections"])
def test_a_loader_process_that_is_killed_as_it_hands_over_a_batch_is_named(
    loader: Any, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    answer = multiprocessing.connection.answer_challenge
    poll, asked = multiprocessing.popen_fork.Popen.poll, list[int]()

    def poll_before_it_ended(self: Any, *flags: int) -> int | None:
        """Say that a process runs: the system closes its connections, its sentinel too, before it has ended."""
        asked.append(self.pid)
        return None if asked.count(self.pid) <= 3 else poll(self, *flags)

    def kill_and_answer(*words: Any) -> None:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
            os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)
        answer(*words)

    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would be the first to tell
    try:
        with monkeypatch.context() as patch:
            patch.setattr(multiprocessing.connection, "answer_challenge", kill_and_answer)
            # as between the end of its connections and its own
            patch.setattr(multiprocessing.process.BaseProcess, "is_alive", lambda self: True)
            if is_slow:
                patch.setattr(multiprocessing.popen_fork.Popen, "poll", poll_before_it_ended)
            with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) was ended by SIGKILL"):
                for _ in loader:
                    pass
    finally:
        signal.signal(signal.SIGCHLD, before)


@LINUX
@SIGNALS
def test_a_process_that_is_killed_as_the_thread_of_its_queue_starts_leaves_no_thread(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises in its signal handler, so between any two lines of multiprocessing."""
    before = set(threading.enumerate())

    def raise_after_start(message: str, *args: Any) -> None:
        if message.startswith("... done self._thread.start"):
            raise RuntimeError("a loader process is killed by signal: Killed.")

    monkeypatch.setattr(multiprocessing.queues, "debug", raise_after_start)
    with pytest.raises(RuntimeError, match="is killed by signal") as caught:
        list(loader)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert caught.value.__traceback__ is not None, "somebody keeps the error"


@SIGNALS
def test_an_error_of_the_data_set_stays_what_it_is() -> None:
    def fail(samples: list[int]) -> None:
        Path("no-such-file").read_text()

    loader = prepare_data_loader(
        DataLoader([1], num_workers=1, multiprocessing_context="fork", collate_fn=fail)
    )
    with pytest.raises(FileNotFoundError, match="no-such-file"):
        next(iter(loader))


@LINUX
@SIGNALS
def test_an_interrupt_right_after_a_fork_leaves_no_process(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows the new process then: its number is still to be returned."""
    real, before = os.fork, {child.pid for child in psutil.Process().children()}

    def fork() -> int:
        pid = real()
        if pid:
            signal.raise_signal(signal.SIGINT)
        return pid

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fork", fork)
        patch.setattr(failing, "_START_SECONDS", PATIENCE_S)  # both processes are started by then
        next(iter(loader))
    gc.collect()
    wait_until(lambda: {child.pid for child in psutil.Process().children()} <= before)


class Handlers(Dataset[bool]):
    """Says whether an interrupt comes at once in the process that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> bool:
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler


@LINUX
@SIGNALS
def test_an_interrupt_comes_at_once_in_loader_processes() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    loader = prepare_data_loader(
        DataLoader(Handlers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    )
    assert [batch.tolist() for batch in loader] == [[True, True]] * 2
