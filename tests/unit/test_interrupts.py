"""Interrupts that wait until a block is done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accel import interrupts


def test_interrupts_are_held_by_the_outermost_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.delay_interrupt():
        with interrupts.delay_interrupt():
            signal.raise_signal(signal.SIGINT)
        done.append("goes on")
    assert done == ["goes on"]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_interrupt_counts_more_than_an_error_of_the_block(is_interrupted: bool) -> None:
    """Whoever waits for a command that fails in the end has interrupted it all the same."""
    with (
        pytest.raises(KeyboardInterrupt if is_interrupted else ValueError) as raised,
        interrupts.delay_interrupt(),
    ):
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        raise ValueError("it has failed")
    assert raised.traceback[-1].path.name == ("interrupts.py" if is_interrupted else "test_interrupts.py")


@pytest.fixture
def handler() -> Iterator[list[int]]:
    """The interrupts that a handler of the user's own got, which raises nothing."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: came.append(signum))
    yield came
    signal.signal(signal.SIGINT, before)


def test_a_wait_in_the_block_obeys_the_interrupt() -> None:
    done = []
    with interrupts.delay_interrupt():
        interrupts.obey_interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            interrupts.obey_interrupt()
        assert not interrupts.is_interrupted()
        done.append("goes on")
    assert done == ["goes on"], "it is obeyed once"
    interrupts.obey_interrupt()


def test_another_thread_obeys_no_interrupt() -> None:
    raised = []

    def obey() -> None:
        try:
            interrupts.obey_interrupt()
        except BaseException as error:
            raised.append(error)

    with pytest.raises(KeyboardInterrupt), interrupts.delay_interrupt():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=obey)
        thread.start()
        thread.join()
    assert not raised


def test_code_of_the_user_is_interrupted_at_once() -> None:
    done = []
    with interrupts.delay_interrupt():
        with pytest.raises(KeyboardInterrupt), interrupts.allow_interrupt():
            signal.raise_signal(signal.SIGINT)
            done.append("too late")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allow_interrupt():
            done.append("too late")
    assert not done


def test_a_handler_that_code_of_the_user_sets_stays(handler: list[int]) -> None:
    own: list[int] = []
    with interrupts.delay_interrupt(), interrupts.allow_interrupt():
        signal.signal(signal.SIGINT, lambda signum, frame: own.append(signum))
    signal.raise_signal(signal.SIGINT)
    assert own == [signal.SIGINT] and not handler


def test_code_of_the_user_may_have_interrupts_ignored(handler: list[int]) -> None:
    with interrupts.delay_interrupt():
        with interrupts.allow_interrupt():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)
        interrupts.obey_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not handler


def test_waits_obey_where_the_system_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    with interrupts.delay_interrupt():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.obey_interrupt()


def test_a_handler_of_the_user_is_called_in_place_of_an_exception(handler: list[int]) -> None:
    with interrupts.delay_interrupt():
        signal.raise_signal(signal.SIGINT)
        assert not handler
        interrupts.obey_interrupt()
        assert handler == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert handler == [signal.SIGINT] * 2


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.delay_interrupt():
            signal.raise_signal(signal.SIGINT)
            interrupts.obey_interrupt()
            with interrupts.allow_interrupt():
                pass
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_soon() -> None:
    """Interrupt this thread in the midst of what it waits for next."""
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()


@pytest.mark.parametrize("patience", [0.0, 0.3])
def test_a_wait_that_obeys_nothing_is_left_all_the_same(patience: float) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts.delay_interrupt(patience):
        interrupt_soon()
        time.sleep(600)  # to its end it would take longer than a test may
    assert not interrupts.is_interrupted()


def test_a_block_that_must_not_be_torn_is_not() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.delay_interrupt(0.0):
        with interrupts.delay_interrupt():
            interrupt_soon()
            while not interrupts.is_interrupted():
                time.sleep(0.01)
            done.append("goes on")
        time.sleep(600)
    assert done == ["goes on"]


def test_what_was_obeyed_does_not_come_again() -> None:
    before = threading.active_count()
    with interrupts.delay_interrupt(0.0):
        with interrupts.delay_interrupt():
            interrupt_soon()
            while not interrupts.is_interrupted():
                time.sleep(0.01)
            with pytest.raises(KeyboardInterrupt):
                interrupts.obey_interrupt()
        handler: Any = signal.getsignal(signal.SIGINT)
        while handler.is_insisting or threading.active_count() > before:
            time.sleep(0.01)


def test_what_was_taken_does_not_come_again() -> None:
    assert not interrupts.take_interrupt()  # nothing delays it
    with interrupts.delay_interrupt():
        assert not interrupts.take_interrupt()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.take_interrupt()
        assert not interrupts.take_interrupt()


def test_one_that_is_late_at_the_end_of_a_block_leaves_the_handler_of_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts.delay_interrupt(0.0):
        handler: Any = signal.getsignal(signal.SIGINT)
        end = handler.end
        handler.end = lambda: (signal.raise_signal(signal.SIGINT), end())
    assert signal.getsignal(signal.SIGINT) is before
