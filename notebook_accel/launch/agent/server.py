"""The agent's own process: takes orders, starts workers, and tells how they end.

It imports torch once, and forks itself for each worker. What the notebook has imported besides is imported by a
template: a fork of the agent, or of the last template, that takes the orders from then on. No code of the user runs in
either. Where a fork would not be what a fresh process is, a fresh Python is started instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NoReturn

from ... import environ
from ...stream import displays
from ..transfer.shared_memory import write_unnamed
from ..worker import lifeline
from . import orders, worker
from .modules import Modules, import_all, read_by_imports
from .orders import ImportOrder, WorkerOrder

NAME: Final = "accel-agent"
"""As the system lists the process, where it lists names."""
_BASE: Final = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "tqdm.std",
    "notebook_accel.launch.worker.main",
    "notebook_accel.accelerator",
)
_SHELL: Final = "IPython.core.interactiveshell"
MAY_FORK: Final = sys.platform == "linux"  # frameworks of macOS do not bear a fork without exec
_CONNECTION: Final = 3  # how the notebook numbers the descriptors of its agent
_LIFELINE: Final = 4
_NICE: Final = 10
_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER of Linux
_BYTES: Final = 1 << 12


def main(*, with_ipython: bool, background: bool, idle_seconds: float | None) -> NoReturn:
    """Serve the notebook; never returns.

    Args:
        with_ipython: whether the notebook has IPython.
        background: whether to import at once, while nobody waits for it.
        idle_seconds: after which an agent without orders and workers ends; None for never.
    """
    os.setsid()
    _keep_own_descriptors()
    lifeline.follow(_LIFELINE)
    _adopt_orphans()
    _raise_limit()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a worker lets it through once it can obey
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # Python's of forks beside native threads
    variables = environ.snapshot()
    os.chdir(os.sep)
    base = [*_BASE, *([_SHELL] if with_ipython else [])]
    connection = socket.socket(fileno=_CONNECTION)
    server = Server(connection, _LIFELINE, base, read_by_imports(variables), idle_seconds)
    server.serve(background=background)


def become(log: int, connection: int, end: int) -> NoReturn:
    """Be the agent of the process that this one was just forked of, with all that it has imported; never returns.

    Args:
        log: takes what this process writes.
        connection: orders come from there.
        end: of the lifeline.
    """
    os.setsid()
    for standard in (1, 2):
        os.dup2(log, standard)
    lifeline.follow(end)
    _adopt_orphans()
    variables = read_by_imports(environ.snapshot())
    Server(socket.socket(fileno=connection), end, [], variables, None).serve(background=False)


class Server:
    """An agent, or a template.

    Args:
        connection: orders come from there.
        end: of the lifeline.
        names: what to import.
        variables: those that libraries of this process have read.
        idle_seconds: as for `main`; a template only tells the agent.
        is_template: whether it starts all workers that it is told to, as forks of itself.
    """

    def __init__(
        self,
        connection: socket.socket,
        end: int,
        names: Sequence[str],
        variables: Mapping[str, str],
        idle_seconds: float | None,
        *,
        is_template: bool = False,
    ) -> None:
        self._connection = connection
        self._end = end
        self._names = names
        self._variables = variables
        self._idle_seconds = idle_seconds
        self._is_template = is_template
        self._importing: threading.Thread | None = None
        self._is_imported = False
        self._can_fork: bool | None = None  # None before the import
        self._is_open = True  # whether orders may still come
        self._versions: Mapping[str, tuple[int, int]] = {}  # of the packages that it has imported
        self._workers: dict[int, tuple[int, int]] = {}  # status pipe and lifeline, by process id
        self._ended: dict[int, int] = {}  # lifelines by status pipe, of workers that have ended
        self._template: _Template | None = None  # the one that gets orders
        self._templates: list[_Template] = []  # also those that only have workers still
        self._unwanted: set[str] = (
            set()
        )  # one of them may have ended a template, or kept it from being forked

    def serve(self, *, background: bool) -> NoReturn:
        """Take orders until nobody sends any and no worker is left; never returns.

        Args:
            background: whether to import at once, while nobody waits for it; else when an order needs it.
        """
        _set_name(NAME)
        self._woken, self._wakes = os.pipe()
        for fd in (self._woken, self._wakes):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._selector = selectors.PollSelector()
        self._selector.register(self._connection, selectors.EVENT_READ, self._obey)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        if background and MAY_FORK:
            # Python 3.14 gives the system a thread's name, which threads of libraries inherit
            self._importing = threading.Thread(target=self._import, args=(True,), name=NAME)
            self._importing.start()
        elif self._is_template:
            self._finish_import()
        while self._is_open or self._workers or self._ended or self._templates:
            is_idle = self._is_open and not self._workers and self._template is None
            ready = self._selector.select(self._idle_seconds if is_idle else None)
            if not ready:
                self._end_idle()
            for key, _ in ready:
                try:
                    key.data()
                except EOFError:  # or no descriptor is free for an order: others are not read either
                    self._selector.unregister(self._connection)
                    with contextlib.suppress(OSError):
                        self._connection.shutdown(socket.SHUT_RD)
                    self._is_open = False
            if not self._is_open and not (self._template is not None and self._template.waiting):
                self._leave_template()
        os._exit(0)

    def _end_idle(self) -> None:
        """Tell the agent that this template is idle; an agent ends: what was sent is obeyed, then `receive` raises."""
        if self._is_template:
            self._say(orders.IDLE)
        elif not self._workers:
            self._connection.shutdown(socket.SHUT_RD)

    # -- imports

    def _import(self, background: bool) -> None:
        if background:
            os.nice(_NICE)  # of this thread alone, as Linux has it
        import_all(self._names)
        if not self._is_template:
            with contextlib.suppress(Exception):  # the worker that needs it says why
                getattr(sys.modules[__name__.partition(".")[0]], "Accelerator")  # noqa: B009  # with what public names need
                displays.prepare()
        self._is_imported = True
        os.write(self._wakes, b"i")

    def _finish_import(self) -> bool:
        """Wait until all is imported; return whether this process can be forked."""
        if not MAY_FORK:
            return False
        if self._can_fork is None:
            if self._importing is None:
                self._import(background=False)
            else:
                self._importing.join()
            self._versions = Modules.capture().versions
            self._can_fork = "torch" in sys.modules and is_clean()
            self._is_imported = False
            gc.freeze()  # else each fork would copy pages that it only counts references in
            if self._is_template:
                self._say(orders.CLEAN if self._can_fork else orders.UNCLEAN)
        return self._can_fork

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody listens
            self._connection.send(word, socket.MSG_DONTWAIT)

    # -- orders

    def _obey(self) -> None:
        self._carry_out(*orders.receive(self._connection))

    def _carry_out(self, order: WorkerOrder | ImportOrder, fds: list[int]) -> None:
        """Do what was ordered; the descriptors belong to the order."""
        try:
            if isinstance(order, WorkerOrder):
                self._take_worker(order, fds)
            elif self._is_template:
                if self._finish_import():  # else the agent sees that there is none
                    self._fork_template(order, fds)
            elif not self._prepare(order, fds, is_asked=True):
                self._say(orders.CLEAN)
        finally:
            for fd in fds:
                os.close(fd)

    def _take_worker(self, order: WorkerOrder, fds: list[int]) -> None:
        if self._is_template:
            self._start(order, fds, fresh=False)
        elif order.command or not self._finish_import() or self._has_changed(order):
            self._start(order, fds, fresh=True)
        elif order.outlives:  # a template would be between
            self._start(order, fds, fresh=False)
        else:
            self._prepare(order.imports, fds, is_asked=False)
            template = self._template
            if template is None:
                self._start(order, fds, fresh=False)
            elif template.is_new:
                template.waiting.append((order, fds.copy()))
                fds.clear()
            else:
                try:
                    orders.forward(template.connection, fds)
                except ConnectionError:  # it has ended
                    self._hear(template)
                    self._take_worker(order, fds)

    def _has_changed(self, order: WorkerOrder) -> bool:
        """Return whether a fresh process would find something else than this one has."""
        is_new = order.imports.modules.differs(self._versions)
        return is_new or read_by_imports(order.environment) != self._variables

    # -- templates

    def _prepare(self, order: ImportOrder, fds: Sequence[int], *, is_asked: bool) -> bool:
        """Make a template that has what the notebook has, where the last one, or this process, has not.

        Args:
            order: says what the notebook has.
            fds: which the template does not keep.
            is_asked: whether the notebook is told when all is imported.

        Returns:
            Whether a template was made.
        """
        if not self._finish_import():
            return False
        if self._template is not None and order.modules.differs(self._template.versions):
            self._leave_template()
        before = self._template
        wanted = [name for name in order.modules.names if name not in self._unwanted]
        added = set(wanted) - sys.modules.keys() - (before.names if before is not None else set())
        if not added:
            return False
        order = replace(order, modules=replace(order.modules, names=wanted))
        try:
            template, given = _Template.make(order, added, is_asked=is_asked)
        except OSError:  # no descriptor is free: workers import it themselves
            return False
        if before is None:
            self._fork_template(order, given, *template.filenos(), *fds)
        else:
            with contextlib.suppress(ConnectionError):  # it has ended: so does the connection of the new one
                orders.forward(before.connection, given)
        for fd in given:
            os.close(fd)
        self._leave_template()
        self._template = template
        self._templates.append(template)
        self._selector.register(template.connection, selectors.EVENT_READ, partial(self._hear, template))
        return True

    def _fork_template(self, order: ImportOrder, fds: Sequence[int], *others: int) -> None:
        """Fork a template of this process; where that fails, its connection ends.

        Args:
            order: what it imports.
            fds: of the order, of its connection and of its lifeline.
            others: which the template does not keep.
        """
        try:
            if os.fork() != 0:
                return
        except OSError:
            return
        try:
            self._leave_parent()
            file, connection, end = fds
            for fd in (file, *others):
                os.close(fd)
            os.setsid()
            lifeline.follow(end)
            environ.restore(order.environment)
            sys.path += [entry for entry in order.path if entry and entry not in sys.path]
            names = [name for name in order.modules.names if name not in sys.modules]
            template = Server(
                socket.socket(fileno=connection), end, names, {}, self._idle_seconds, is_template=True
            )
            template.serve(background=order.in_background)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _hear(self, template: _Template) -> None:
        """Note what a template says of itself, or its end."""
        if template not in self._templates:  # its end was noticed in this pass already
            return
        try:
            said = template.connection.recv(1)
        except ConnectionError:
            said = b""
        was_new, template.is_new = template.is_new, False
        if was_new and template.is_asked:
            self._say(orders.CLEAN)
        if said == orders.IDLE:
            if template is self._template:
                self._end_idle()
        elif said != orders.CLEAN:
            if was_new:  # its imports have ended it, or have left it so that it cannot be forked
                self._unwanted |= template.added
            if template is self._template:
                self._leave_template()
        while template.waiting:
            self._carry_out(*template.waiting.pop(0))
        if not said:
            self._selector.unregister(template.connection)
            self._templates.remove(template)
            template.close()

    def _leave_template(self) -> None:
        """Give the template no orders any more: it ends once its workers have."""
        if self._template is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._template.connection.shutdown(socket.SHUT_WR)
            self._template = None

    # -- workers

    def _start(self, order: WorkerOrder, fds: Sequence[int], *, fresh: bool) -> None:
        """Start a worker, and tell its process id."""
        opened: list[int] = []
        try:
            opened += os.pipe()
            opened.append(os.dup(fds[1]))
            pid = _fork_away() if order.outlives else os.fork()
            if pid == 0:
                self._become_worker(order, fds, *opened, fresh=fresh)
        except OSError as error:
            _tell(fds[1], orders.FAILED, error.errno or 0)
            for fd in opened:
                os.close(fd)
            return
        end, held, status = opened
        _tell(status, orders.STARTED, pid)
        os.close(end)
        if order.outlives:
            os.close(held)
            os.close(status)
        else:
            self._workers[pid] = (status, held)

    def _become_worker(self, order: WorkerOrder, fds: Sequence[int], *others: int, fresh: bool) -> NoReturn:
        end, held, status = others
        try:
            _set_name(Path(sys.executable).name)
            self._leave_parent()
            for fd in (status, held, fds[1]):
                os.close(fd)
            os.setsid()
            order.limits.adopt()
            os.dup2(fds[3], 1)
            os.dup2(fds[4], 2)
            if fresh:
                worker.execute(order, fds, end)
            worker.run(order, fds, end)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _leave_parent(self) -> None:
        """In a fork: close what belongs to the process that was forked."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        of_workers = chain(*self._workers.values(), *self._ended.items())
        for fd in (self._end, self._woken, self._wakes, *of_workers):
            os.close(fd)
        self._connection.close()
        for template in self._templates:
            template.close()

    def _note_end(self, pid: int, exit_status: int) -> None:
        if pid in self._workers:
            status, held = self._workers.pop(pid)
            _tell(status, orders.ENDED, os.waitstatus_to_exitcode(exit_status))
            self._ended[status] = held
            self._selector.register(status, selectors.EVENT_READ, partial(self._let_go, status))

    def _let_go(self, status: int) -> None:
        """Cut the lifeline of a worker that has ended: the notebook reads no more of it, and has ended what it left."""
        self._selector.unregister(status)
        os.close(status)
        os.close(self._ended.pop(status))

    def _reap(self) -> None:
        """Tell how workers have ended, and finish the import: the end of either wakes this process."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, _BYTES)
        if self._importing is not None and self._importing.is_alive():  # it may wait for processes of its own
            for pid in list(self._workers):
                self._note_end(*os.waitpid(pid, os.WNOHANG))
        else:
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    self._note_end(*found)
        if self._is_imported:
            self._finish_import()


@dataclass(kw_only=True, slots=True, eq=False)
class _Template:
    """A template, as the agent knows it.

    Attributes:
        connection: to it.
        held: the end of its lifeline; it is killed with the agent.
        names: the modules that it has, or tries to have.
        added: those of them that the process had not that it is a fork of.
        versions: of their packages, when it was made.
        is_asked: whether the notebook waits for its imports.
        is_new: whether it still imports, as far as it has said.
        waiting: orders of workers, with their descriptors, until it has imported all.
    """

    connection: socket.socket
    held: int
    names: set[str]
    added: set[str]
    versions: Mapping[str, tuple[int, int]]
    is_asked: bool
    is_new: bool = True
    waiting: list[tuple[WorkerOrder, list[int]]] = field(default_factory=list)

    @classmethod
    def make(cls, order: ImportOrder, added: set[str], *, is_asked: bool) -> tuple[_Template, list[int]]:
        """Return what joins the agent with a template that is to be forked, and the descriptors of its order."""
        connection, theirs = socket.socketpair()
        end, held = os.pipe()
        template = cls(
            connection=connection,
            held=held,
            names=set(order.modules.names),
            added=added,
            versions=order.modules.versions,
            is_asked=is_asked,
        )
        return template, [write_unnamed(pickle.dumps(order)), theirs.detach(), end]

    def filenos(self) -> list[int]:
        """Return the agent's ends."""
        return [self.connection.fileno(), self.held]

    def close(self) -> None:
        """Close the agent's ends, and what waits."""
        self.connection.close()
        for fd in (self.held, *chain.from_iterable(fds for _, fds in self.waiting)):
            os.close(fd)


def _tell(status: int, what: bytes, number: int) -> None:
    with contextlib.suppress(OSError):  # the notebook has given the worker up
        os.write(status, orders.STATUS.pack(what, number))


def _adopt_orphans(yes: bool = True) -> None:
    """Let templates whose template has ended stay below this process, as debuggers of workers may require."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, int(yes), 0, 0, 0)


def _fork_away() -> int:
    """Fork a process that is no descendant of this one; return 0 in it, and here the id of one that has ended.

    Raises:
        OSError: the system gives no process.
    """
    _adopt_orphans(False)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                if os.fork() == 0:
                    return 0
                os._exit(0)
            except OSError as error:
                os._exit(error.errno or 1)
        _, status = os.waitpid(pid, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise OSError(code, os.strerror(code))
        return pid
    finally:
        _adopt_orphans()


def _keep_own_descriptors() -> None:
    """Close what a library of the notebook has opened for its child processes too, and keep it from workers."""
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the list itself
            if fd > _LIFELINE:
                os.close(fd)
            elif fd >= _CONNECTION:
                os.set_inheritable(fd, False)


def _raise_limit() -> None:
    """Let this process have as many descriptors as the system allows: it needs some for each worker."""
    import resource  # here: a file beside the notebook may have this name

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS has more in name than in fact
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_name(name: str) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(name[:15])


def is_clean() -> bool:
    """Return whether this process can be forked after its imports: no device is open, no thread would be missing."""
    from ..checks import fork_obstacles  # here: it needs torch

    others = fork_obstacles.find_native_threads() or fork_obstacles.find_open_devices()
    return threading.active_count() == 1 and not others
