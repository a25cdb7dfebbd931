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
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

_PACKAGE = "notebook_accel"
_QUIET_SECONDS = 0.5  # of a short script nobody has to hear: it imports nothing of ours
_GO_BYTES = 1  # of `stream.wire.GO`


def main() -> None:
    """Run what the arguments name, and leave as it does."""
    rank, events, lifeline, stack_signal = map(int, sys.argv[1].split(","))
    kind, *words = sys.argv[2:]
    _ours("launch.worker.lifeline").follow(lifeline)
    if os.read(events, _GO_BYTES) == b"":
        sys.exit(1)  # the launcher has given up
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    for descriptor in (events, lifeline):
        os.set_inheritable(descriptor, kind == "program" and descriptor == lifeline)
    if kind == "program":
        _become(words)
    faulthandler.enable(2)
    if stack_signal and sys.platform != "win32":
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

    A process that the script forks has no such way: how it ends is the script's own. Neither has a script that closes
    all descriptors, as daemons do.

    Args:
        rank: this process's.
        events: descriptor of the socket.
    """

    def __init__(self, rank: int, events: int) -> None:
        self._place = (rank, events, threading.get_ident())
        self._events = events
        self._socket = _identify(events)
        self._pid = os.getpid()
        self._reporter: Any = None
        self._lock = threading.Lock()
        atexit.register(self._end)  # the first, so that it is called last
        threading.Thread(target=self._listen, name="notebook_accel listener", daemon=True).start()

    def _listen(self) -> None:
        """Begin to listen at the first question, or half a second from now."""
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            _ours("stream.readable").wait_readable(self._events, _QUIET_SECONDS)
            self._connect()

    def _connect(self) -> Any:
        """Return the reporter; None where the way to the launcher is closed."""
        with self._lock:
            if _identify(self._events) != self._socket:
                return None
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
        reporter = self._connect() if os.getpid() == self._pid else None
        if reporter is None:
            sys.excepthook(type(error), error, frames)
        else:
            reporter.show_traceback(error, now, moment)

    def _end(self) -> None:
        """Send the failure, where there is one, and end what the script has started."""
        if self._reporter is None:
            return
        if _identify(self._events) != self._socket:
            self._reporter.let_go()
        elif os.getpid() == self._pid:
            self._reporter.send_failure()
            _ours("launch.worker.lifeline").end_children()


def _identify(descriptor: int) -> tuple[int, int] | None:
    """Return what a descriptor stands for, by device and inode; None where it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_ours(filename: str) -> bool:
    """Return whether a file's frames lie between the interpreter and the script; newer Pythons have runpy frozen."""
    main_module = sys.modules[f"{_PACKAGE}.launch.main_module"].__file__
    runpy = os.path.join(os.path.dirname(os.__file__), "runpy.py")
    return filename in (__file__, main_module, "<frozen runpy>", runpy)


def _ours(name: str) -> Any:
    """Return a module of this package, which need not be where the script finds its own."""
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError:
        with _package_on_path():
            return importlib.import_module(f"{_PACKAGE}.{name}")


@contextlib.contextmanager
def _package_on_path() -> Iterator[None]:
    place = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path.append(place)
    try:
        yield
    finally:
        sys.path.remove(place)


if __name__ == "__main__":
    main()
