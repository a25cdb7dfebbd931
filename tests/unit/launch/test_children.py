"""How functions that are launched start processes of their own, where forks are not the default: as in Python 3.14."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import sys
import threading
from collections.abc import Iterator

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
