"""A rank that runs a script: the script finds what it would find without a launcher.

python script.py RANK,EVENTS,LIFELINE,STACK_SIGNAL KIND NAME [ARGUMENT ...]

EVENTS and LIFELINE are descriptors. The file is run by its path, and imports from this package only what it needs and
when it needs it: what a script imports, and how long that takes, is the script's own.
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # its modules are no top-level ones, and have names that others have

import atexit
import contextlib
import faulthandler
import importlib
import io
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

_PACKAGE = "notebook_accel"
_PLACE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_QUIET_SECONDS = 0.5  # of a short script nobody has to hear: it imports nothing of ours
_GO_BYTES = 1  # of `stream.wire.GO`


def main() -> None:
    """Run what the arguments name, and leave as it does."""
    rank, events, lifeline, stack_signal = map(int, sys.argv[1].split(","))
    kind, *words = sys.argv[2:]
    _ours("launch.worker.lifeline").follow(lifeline)
    if os.read(events, _GO_BYTES) == b"":
        sys.exit(1)  # the launcher has given up
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    for descriptor in (events, lifeline):
        os.set_inheritable(descriptor, kind == "program" and descriptor == lifeline)
    if kind == "program":
        _become(words)
    faulthandler.enable(2)
    if stack_signal:
        faulthandler.register(stack_signal, 2, all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it is a pipe, and somebody looks at the other end
    launcher = _Launcher(rank, events)
    main_module = _ours("launch.main_module")
    try:
        main_module.run(kind, words)
    except SystemExit:
        raise
    except BaseException as error:
        launcher.report(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _become(words: Sequence[str]) -> NoReturn:
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")


class _Launcher:
    """The way to the launcher, which a short script that fares well does without.

    A process that the script forks has no such way: how it ends is the script's own.

    Args:
        rank: this process's.
        events: descriptor of the socket.
    """

    def __init__(self, rank: int, events: int) -> None:
        self._place = (rank, events, threading.get_ident())
        self._pid = os.getpid()
        self._reporter: Any = None
        self._lock = threading.Lock()
        atexit.register(self._end)  # the first, so that it is called last
        threading.Thread(target=self._listen, name="notebook_accel listener", daemon=True).start()

    def _listen(self) -> None:
        time.sleep(_QUIET_SECONDS)
        with contextlib.suppress(OSError):  # the script may have closed the socket
            self._connect()

    def _connect(self) -> Any:
        """Return the reporter."""
        with self._lock:
            if self._reporter is None:
                self._reporter = _ours("launch.worker.script_reporter").ScriptReporter(*self._place)
            return self._reporter

    def report(self, error: BaseException) -> None:
        """Show the launcher what the script raised; that it failed is said when its exit handlers have run.

        The launcher ends the ranks then, and the handlers must not be cut short.
        """
        now, moment = time.time(), time.monotonic()  # what is imported below takes its time
        frames = error.__traceback__
        while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        error = error.with_traceback(frames)
        if os.getpid() == self._pid:
            self._connect().show_traceback(error, now, moment)
        else:
            sys.excepthook(type(error), error, frames)

    def _end(self) -> None:
        """Send the failure, where there is one, and end what the script has started."""
        if self._reporter is not None and os.getpid() == self._pid:
            self._reporter.send_failure()
            _ours("launch.leftovers").end_children()


def _is_ours(filename: str) -> bool:
    """Return whether a file's frames lie between the interpreter and the script; newer Pythons have runpy frozen."""
    main_module = sys.modules[f"{_PACKAGE}.launch.main_module"].__file__
    runpy = os.path.join(os.path.dirname(os.__file__), "runpy.py")
    return filename in (__file__, main_module, "<frozen runpy>", runpy)


def _ours(name: str) -> Any:
    """Return a module of this package, which need not be where the script finds its own."""
    before = list(sys.path)
    sys.path.append(_PLACE)
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    finally:
        sys.path[:] = before


if __name__ == "__main__":
    main()
