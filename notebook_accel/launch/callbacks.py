"""The thread of a run. Its end calls functions of the user's, and wakes who awaits it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from .. import interrupts
from ..errors import LaunchError
from ..notices import tell


def start_thread(function: Callable[[], None], name: str) -> None:
    """Call a function in a thread of its own; what it raises is dropped there.

    Args:
        function: called without arguments.
        name: of the thread.

    Raises:
        LaunchError: the system gives no more threads.
    """

    def call() -> None:
        with contextlib.suppress(BaseException):
            function()

    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError as error:
        text = f"{error}; if the system gives no more, raise its limit (ulimit -u)"
        raise LaunchError(text) from error


def call_back(callbacks: Sequence[Callable[[], None]], run: object) -> None:
    """Call functions of the user's; what one raises is told, and an interrupt comes after the last.

    Args:
        callbacks: called without arguments, in order.
        run: what has ended.

    Raises:
        KeyboardInterrupt: one came meanwhile.
    """
    interrupt = None
    for callback in callbacks:
        try:
            interrupts.obey_interrupt()
        except KeyboardInterrupt as error:  # of what came before: this one is called all the same
            interrupt = error
        try:
            with interrupts.allow_interrupt():
                callback()
        except BaseException as error:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            text = f"{name} failed at the end of {run!r}: {type(error).__name__}: {error}"
            tell(text)
            interrupt = error if isinstance(error, KeyboardInterrupt) else interrupt
    if interrupt is not None:
        raise interrupt


async def wait_in_loop(
    ended: threading.Event, when_ended: Callable[[Callable[[], None]], None], look_seconds: float
) -> None:
    """Wait for the end of a run in an event loop.

    Args:
        ended: is set at the end.
        when_ended: takes a function to be called then, in any thread.
        look_seconds: how often the loop wakes up: ipykernel's sees an interrupt only then.
    """
    woken = asyncio.get_running_loop().create_future()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            woken.get_loop().call_soon_threadsafe(woken.set_result, None)

    when_ended(wake)
    while not (woken.done() or ended.is_set()):
        await asyncio.wait([woken], timeout=look_seconds)
