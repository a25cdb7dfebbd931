"""How the agent of a host is reached and started; and what the environment there has to be."""

from __future__ import annotations

import base64
import json
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from .... import probes
from ....takeover import finder
from .transport import ProcessTransport, Transport

MARK: Final = "notebook_accel:"
"""What begins each line that is ours, before the frames begin; a nonce of the connection follows."""
NO_PACKAGE: Final = 97
"""Exit code of a Python that lacks the package."""
WARM_SECONDS: Final = 600.0
"""How long an agent stays without a run, where its client does not say otherwise."""
_BOOTSTRAP: Final = Path(__file__).with_name("bootstrap.py")
_INSTALLED: Final = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the environment of a host has to be.

    Attributes:
        python: version of Python, as `3.11`.
        torch: version of torch, without what follows a `+`.
        package: version of this package, empty where it runs from a folder.
        with_ipython: whether processes import IPython, because the notebook has.
        takes_over: whether `import accelerate` gives this package.
    """

    python: str
    torch: str
    package: str
    with_ipython: bool
    takes_over: bool

    @classmethod
    def here(cls) -> Wanted:
        """Return what this process has."""
        import torch  # only now: commands that list runs need none of it

        return cls(
            python="{}.{}".format(*sys.version_info[:2]),
            torch=strip_build(torch.__version__),
            package=probes.version("notebook-accel") or "",
            with_ipython="IPython" in sys.modules,
            takes_over=finder.is_installed(),
        )


class Client(ABC):
    """What leads to the agents of hosts.

    Attributes:
        program: what runs here, for messages.
        connection: what it makes, for messages.
        host_noun: what a place of ranks is called, for messages.
    """

    program: ClassVar[str]
    connection: ClassVar[str]
    host_noun: ClassVar[str] = "host"

    @abstractmethod
    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return the line of the errors that says most why a connection has ended.

        Args:
            said: the lines.
        """


class Connector(Client):
    """A client that starts the agents. Equal ones can share connections.

    Attributes:
        warm_seconds: how long an agent stays without a run.
    """

    @property
    def warm_seconds(self) -> float:
        """How long an agent stays without a run."""
        return WARM_SECONDS

    @abstractmethod
    def connect(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> Transport:
        """Return the way to the agent on a host, which it starts.

        Args:
            host: its name.
            python: path or name of the Python there; None tries that of this process, then others.
            nonce: what marks our lines of this connection.
            wanted: what the environment there has to be.
        """

    @abstractmethod
    def explain_failure(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Return why no agent has started, as a sentence.

        Args:
            host: where it should have.
            code: the exit code of the command; None where it has not ended.
            said: the lines that it has written to its errors.
        """


class CommandClient(Connector):
    """A client that is a program with pipes to it, such as `ssh`."""

    @abstractmethod
    def make_command(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> list[str]:
        """Return the command that starts the agent on a host; the arguments are those of `connect`."""

    def make_environment(self) -> Mapping[str, str] | None:
        """Return the variables of the command, None for those of this process."""
        return None

    def connect(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> Transport:
        """Start the program."""
        return ProcessTransport(self.make_command(host, python, nonce, wanted), self.make_environment())


def strip_build(version: str) -> str:
    """Return a version without its build: `2.13.0` for `2.13.0+cu128`."""
    return version.partition("+")[0]


def make_script(
    python: str | None, nonce: str, wanted: Wanted, warm_seconds: float = WARM_SECONDS, lock: str = ""
) -> str:
    """Return a script for `sh -c` that becomes the agent, in a line.

    Args:
        python: path or name of the Python; None tries that of this process, then others.
        nonce: what marks our lines of this connection.
        wanted: what the environment has to be.
        warm_seconds: how long the agent stays without a run.
        lock: path of a file that the agent locks while it is there; empty for none.
    """
    settings = {
        "nonce": nonce,
        "python": wanted.python,
        "folder": find_source_folder(),
        "with_ipython": wanted.with_ipython,
        "variable": finder.VARIABLE if wanted.takes_over else "",
        "warm": warm_seconds,
        "lock": lock,
    }
    program = base64.b64encode(_BOOTSTRAP.read_bytes()).decode()
    code = f'import base64;exec(base64.b64decode("{program}").decode())'
    text = base64.b64encode(json.dumps(settings).encode()).decode()
    return (
        f'for p in {list_pythons(python)}; do command -v "$p" >/dev/null 2>&1 || continue; '
        f'"$p" -c {shlex.quote(code)} {text}; s=$?; [ $s = {NO_PACKAGE} ] || exit $s; done; exit {NO_PACKAGE}'
    )


def list_pythons(python: str | None) -> str:
    """Return the words of a shell for the Pythons to try.

    Args:
        python: path or name of the Python; None tries that of this process, then others.
    """
    candidates = [python] if python else list(dict.fromkeys([sys.executable, "python3", "python"]))
    return " ".join(map(_quote_path, candidates))


def _quote_path(path: str) -> str:
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def find_source_folder() -> str:
    """Return the folder that this package runs from, empty where it is installed: a host that has it uses it too."""
    folder = Path(__file__).resolve().parents[4]
    return "" if any(part in _INSTALLED for part in folder.parts) else str(folder)


def find_mismatches(
    host: str, facts: Mapping[str, Any], wanted: Wanted, *, noun: str = "host", by_host: bool = True
) -> list[str]:
    """Return what is wrong with the environment of a host, a sentence each.

    Args:
        host: its name.
        facts: what the bootstrap there has said.
        wanted: what is needed.
        noun: what hosts are called.
        by_host: whether the sentence that names another Python names it for this host.
    """
    where = f"{noun} {host}: {facts.get('executable', 'python')}"
    if facts.get("python", "").rpartition(".")[0] != wanted.python:
        return [
            f"{where} is Python {facts.get('python')}, and this process Python {wanted.python}: name the right one, "
            + suggest_python(host, f"/path/to/python{wanted.python}", by_host=by_host)
        ]
    if facts.get("missing"):
        return [
            f"{where} does not have {facts['missing']}: install it there, or name the Python that has it, "
            + suggest_python(host, by_host=by_host)
        ]
    if facts.get("error"):
        return [f"{where} cannot import notebook_accel ({facts['error']})"]
    problems = []
    for name, own in (("torch", wanted.torch), ("notebook_accel", wanted.package)):
        there = strip_build(facts.get(name) or "")
        if there != own:
            problems.append(
                f"{where} has {name} {there or 'from a folder'}, and this process {own or 'from a folder'}: install "
                "the same version"
            )
    return problems


def suggest_python(host: str, path: str = "/path/to/python", *, by_host: bool = True) -> str:
    """Return the argument that names the Python of a host."""
    return f"python={{{host!r}: {path!r}}}" if by_host else f"python={path!r}"
