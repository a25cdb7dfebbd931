"""Starts Python programs as copies of a process that has imported torch, which spares each of them the import."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "torch.distributed", "torch._dynamo")  # optimizers import the last one, in a second
KERNEL = ("ipykernel.kernelapp", "ipykernel.ipkernel")  # what a Jupyter kernel imports besides
MESSAGE_BYTES = 1 << 17
END_S = 10.0  # in which a host ends when nobody asks any more
# What Python, the C library or a library in LIBRARIES reads once, when it starts: a copy would not see a change.
READ_AT_START = (
    *("PYTHON", "LD_", "LANG", "LC_", "TZ", "MALLOC_", "GLIBC_", "PYDEVD_", "MPL"),
    *("OMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOMP_", "ATEN_", "NCCL_", "GLOO_"),
    *("TORCH", "PYTORCH_", "CUDA_", "PJRT_", "XLA_", "USE_", "LOGLEVEL", "JUPYTER_", "IPYTHON_"),
    *("DS_ACCELERATOR", "NOTEBOOK_ACCEL_AS_ACCELERATE"),
)
SET_BY_LIBRARIES = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"})
"""What torch and scikit-learn set for themselves and their children, at some time of a test session."""
COPIED = frozenset(
    {"stdin", "stdout", "stderr", "env", "cwd", "start_new_session"}
    | {"text", "encoding", "errors", "universal_newlines", "bufsize"}
)
"""The options of Popen that a copy follows."""


class Host:
    """A process that is copied: it has imported some libraries, and starts before the first copy.

    Args:
        environment: its variables.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None
        self._owner: int | None = os.getpid()
        self._lock = threading.Lock()
        self._asked = 0

    @property
    def is_ours(self) -> bool:
        """Whether this process may ask: no copy of the one that started the host, which has its socket too."""
        return self._owner == os.getpid()

    def _start(self) -> socket.socket:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(its.fileno())],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # programs have their own, and no terminal
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        self.socket = ours
        return ours

    def ask(self, question: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Return the answer to a question.

        Raises:
            RuntimeError: the process could not do it, or has ended; the next question then starts another.
        """
        if not self.is_ours:
            raise RuntimeError(f"process {os.getpid()} asks a process that belongs to {self._owner}")
        with self._lock:
            channel = self.socket or self._start()
            self._asked += 1
            numbered = json.dumps({**question, "number": self._asked}).encode()
            number = 0
            try:
                socket.send_fds(channel, [numbered], descriptors)
                while number != self._asked:  # who asked before may have been interrupted
                    answer = channel.recv(MESSAGE_BYTES)
                    if not answer:
                        raise ConnectionResetError
                    number, found, error = json.loads(answer)
            except ConnectionError:
                self._end()
                raise RuntimeError("the process that forks has ended") from None
        if error is not None:
            raise RuntimeError(error)
        return found

    def _end(self) -> None:
        channel, process = self.socket, self.process
        self.socket = self.process = None
        if channel is not None:
            with contextlib.suppress(OSError):  # it has ended before
                channel.shutdown(socket.SHUT_RDWR)  # copies of this process may have it too
            channel.close()
        if process is not None:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """End the process for good."""
        if self.is_ours:
            self._owner = None
            self._end()


class Forker:
    """Hosts, one for each set of libraries: what a copy finds imported depends on no copy before it.

    Args:
        environment: the variables of all of them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        self.environment = {**environment, "PYTHONPATH": path}
        self.hosts: dict[tuple[str, ...], Host] = {}
        self._owner = os.getpid()

    @property
    def descriptors(self) -> set[int]:
        """That stay open between programs."""
        return {host.socket.fileno() for host in self.hosts.values() if host.socket is not None}

    def can_start(self, words: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a copy behaves as a Python that this process starts with these words and variables."""
        if os.getpid() != self._owner:  # a copy of a test session, which would be no parent
            return False
        if words[:1] != [sys.executable] or len(words) < 2:
            return False
        if words[1].startswith("-") and words[1] not in ("-m", "-c"):
            return False
        names = {name for name in {*environment, *self.environment} if name.startswith(READ_AT_START)}
        return all(
            _read(name, environment) == _read(name, self.environment) for name in names - SET_BY_LIBRARIES
        )

    def find_host(self, libraries: Sequence[str]) -> Host:
        """Return the host that has imported these libraries besides torch."""
        return self.hosts.setdefault(tuple(libraries), Host(self.environment))

    def close(self) -> None:
        """End all hosts."""
        for host in self.hosts.values():
            host.close()


def _read(name: str, environment: Mapping[str, str]) -> object:
    text = environment.get(name)
    if name == "PYTHONPATH" and text is not None:
        return list(dict.fromkeys(text.split(os.pathsep)))
    return text


CURRENT: list[Forker] = []
"""The one of this test session."""


@contextlib.contextmanager
def session(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Have a forker for the programs of a test session, or of some tests in place of the session's.

    Args:
        environment: its variables, None for those of now.
    """
    CURRENT.append(Forker(os.environ if environment is None else environment))
    try:
        yield
    finally:
        CURRENT.pop().close()


class Copy(subprocess.Popen[Any]):
    """A program that runs in a copy; the process that was copied is its parent, and waits for it.

    Args:
        words: as of `start`.
        libraries: as of `start`.
        options: those of Popen.
    """

    def __init__(self, words: Sequence[str], libraries: Sequence[str], **options: Any) -> None:
        self.libraries = libraries
        self.host = CURRENT[-1].find_host(libraries)
        super().__init__(words, **options)

    def _execute_child(self, *arguments: Any) -> None:
        found = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        environment = os.environ if found["env"] is None else found["env"]
        ends = [found["p2cread"], found["c2pwrite"], found["errwrite"]]
        question = {
            "words": [os.fspath(word) for word in found["args"][1:]],
            "environment": dict(environment),
            "folder": os.fspath(found["cwd"] or os.getcwd()),
            "libraries": [*LIBRARIES, *self.libraries],
        }
        self.pid = self.host.ask(question, [own if end == -1 else end for own, end in enumerate(ends)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(found[name] for name in pipes))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        while True:
            status = self.host.ask({"wait": self.pid})
            if status is not None:
                return self.pid, status
            if wait_flags & os.WNOHANG:
                return 0, 0
            time.sleep(0.01)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        # with a state, Python asks while it collects garbage, which it does inside of `ask` too
        if self.returncode is not None or _deadstate is not None or not self.host.is_ours:
            return self.returncode
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if lock.acquire(False):  # else a thread waits
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


def start(words: Sequence[str], libraries: Sequence[str] = (), **options: Any) -> subprocess.Popen[Any]:
    """Start a program: `subprocess.Popen`, by a copy where that makes no difference.

    Args:
        words: its command; a copy runs a script, `-m` a module or `-c` code by this Python.
        libraries: what it need not import itself, besides torch.
        options: those of Popen.
    """
    words = [os.fspath(word) for word in words]
    environment = os.environ if options.get("env") is None else options["env"]
    asked = {name for name, option in options.items() if option is not None}
    follows = asked <= COPIED and options.get("start_new_session")  # a copy has no other process group
    if follows and CURRENT and sys.platform == "linux" and CURRENT[-1].can_start(words, environment):
        return Copy(words, libraries, **options)
    return subprocess.Popen(words, **options)


def run(words: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end as `subprocess.run` does, with its output as text.

    Args:
        words: as of `start`.
        timeout: seconds after which it is killed.
        options: those of Popen.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with start(words, text=True, **pipes, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)
