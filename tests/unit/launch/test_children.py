"""How functions that are launched start processes of their own, where forks are not the default: as in Python 3.14."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.launch import children
from tests.unit.clock import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are the default of Linux alone")


@pytest.fixture(autouse=True)
def forkserver_is_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = multiprocessing.context._default_context
    monkeypatch.setattr(children, "_PLATFORMS", "forkserver")
    monkeypatch.setattr(found, "_default_context", multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(found, "_actual_context", None)
    yield


def ask() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def test_workers_fork_unless_the_user_chose_another_method() -> None:
    assert children.choose_start_method() == "fork"
    assert multiprocessing.get_start_method() == "forkserver"
    assert children.choose_start_method() == "fork", "a method that was only asked for counts as chosen"
    multiprocessing.set_start_method("spawn", force=True)
    assert children.choose_start_method() == "spawn"


def test_the_default_of_a_worker_can_be_chosen_again() -> None:
    children.set_default("fork")
    assert ask() is None
    assert multiprocessing.get_start_method() == "fork"
    children.set_default("fork")
    multiprocessing.set_start_method("spawn")
    assert ask() == "spawn"


@pytest.mark.parametrize("asked", [False, True])
def test_a_function_in_this_process_forks_and_all_is_as_before(asked: bool) -> None:
    before = multiprocessing.get_start_method() if asked else None
    assert notebook_launcher(multiprocessing.get_start_method, view="none") == "fork"
    assert ask() == before and multiprocessing.get_start_method() == "forkserver"


def test_what_a_function_in_this_process_chooses_stays() -> None:
    notebook_launcher(lambda: multiprocessing.set_start_method("spawn"), view="none")
    assert ask() == "spawn"
    multiprocessing.set_start_method(None, force=True)
    assert multiprocessing.get_start_method() == "forkserver"


def test_what_the_user_chose_counts_in_this_process() -> None:
    multiprocessing.set_start_method("spawn")
    assert notebook_launcher(ask, view="none") == "spawn" == ask()


def test_what_the_user_chose_counts_below_workers_too() -> None:
    children.set_default("spawn")
    assert children.choose_start_method() == "spawn"


def test_functions_of_several_threads_fork_until_the_last_one_ends() -> None:
    inside, over = threading.Event(), threading.Event()
    found: list[str] = []

    def hold() -> None:
        with children.start_as_in_workers():
            inside.set()
            over.wait(PATIENCE_S)
            found.append(multiprocessing.get_start_method())

    other = threading.Thread(target=hold)
    with children.start_as_in_workers():
        other.start()
        assert inside.wait(PATIENCE_S)
    over.set()
    other.join()
    assert found == ["fork"]
    assert ask() is None and multiprocessing.get_start_method() == "forkserver"
    with children.start_as_in_workers(), children.start_as_in_workers():
        assert multiprocessing.get_start_method() == "fork"
    assert multiprocessing.get_start_method() == "forkserver"


def fork(function: Any) -> Any:
    """Return what a function returns in a fork of this process."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=lambda: writing.send(function()))
    process.start()
    writing.close()
    process.join(PATIENCE_S)
    return reading.recv()


def test_sockets_lie_in_the_folder_that_was_chosen(tmp_path: Path) -> None:
    def listen() -> tuple[str, str]:
        children.use_sockets_folder(str(tmp_path))
        with Listener(family="AF_UNIX") as listener:
            return children.get_sockets_folder(), os.path.dirname(str(listener.address))

    assert fork(listen) == (str(tmp_path), str(tmp_path))


def test_a_process_that_shares_a_tracker_leaves_memory_to_its_owner() -> None:
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        code = (
            "import sys; from multiprocessing import shared_memory; from notebook_accel.launch import children\n"
            "children.use_tracker(int(sys.argv[1])); shared_memory.SharedMemory(name=sys.argv[2]).close()"
        )
        tracker = resource_tracker.getfd()
        words = [sys.executable, *children.list_flags(), "-c", code, str(tracker), memory.name]
        subprocess.run(words, pass_fds=[tracker], check=True, timeout=PATIENCE_S)
        shared_memory.SharedMemory(name=memory.name).close()
    finally:
        memory.close()
        memory.unlink()


def test_the_flags_of_this_python_are_passed_on() -> None:
    code = "from notebook_accel.launch import children; print(children.list_flags())"
    words = [sys.executable, "-X", "dev", "-W", "error::BytesWarning", "-O", "-c", code]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert all(flag in told for flag in ("'-O'", "'-X', 'dev'", "'-Werror::BytesWarning'"))


def test_a_process_waits_for_its_children_at_exit(tmp_path: Path) -> None:
    def end() -> bool:
        context = multiprocessing.get_context("fork")
        child = context.Process(target=lambda: time.sleep(0.2))
        daemon = context.Process(target=time.sleep, args=(PATIENCE_S,), daemon=True)
        child.start()
        daemon.start()
        children.wait_at_exit()
        return (child.exitcode, daemon.exitcode) == (0, -signal.SIGTERM)

    assert fork(end)


def test_nobody_waits_for_a_child_that_is_forgotten() -> None:
    def end() -> bool:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(PATIENCE_S,))
        child.start()
        children.forget(child)
        began = time.monotonic()
        children.wait_at_exit()
        child.kill()
        return time.monotonic() - began < PATIENCE_S / 2

    assert fork(end)
