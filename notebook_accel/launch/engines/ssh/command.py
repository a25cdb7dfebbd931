"""The command lines of the user's ssh client, and what it means where it fails."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from .... import probes
from ....takeover import finder

MARK: Final = "notebook_accel:"
"""What begins each line that is ours, before the frames begin; a nonce of the connection follows."""
NO_PACKAGE: Final = 97
"""Exit code of a Python that lacks the package."""
_ALIVE_SECONDS: Final = 4
_ALIVE_COUNT: Final = 3
_CONNECT_SECONDS: Final = 10
_OPTIONS: Final = {
    "BatchMode": "yes",  # it would wait for a password that nobody types
    "ConnectTimeout": _CONNECT_SECONDS,
    "ServerAliveInterval": _ALIVE_SECONDS,
    "ServerAliveCountMax": _ALIVE_COUNT,
    "ClearAllForwardings": "yes",  # those of the user's config may be in use by a terminal
    "ForwardX11": "no",
    "RequestTTY": "no",
    "RemoteCommand": "none",
}
_OURS: Final = "notebook_accel"
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
        return cls(
            python="{}.{}".format(*sys.version_info[:2]),
            torch=strip_build(torch.__version__),
            package=probes.version("notebook-accel") or "",
            with_ipython="IPython" in sys.modules,
            takes_over=finder.is_installed(),
        )


def strip_build(version: str) -> str:
    """Return a version without its build: `2.13.0` for `2.13.0+cu128`."""
    return version.partition("+")[0]


def make_command(ssh: Sequence[str], host: str, python: str | None, nonce: str, wanted: Wanted) -> list[str]:
    """Return the command that starts the agent on a host.

    Args:
        ssh: the client, and options of the user's.
        host: as ssh's command line takes it.
        python: path or name of the Python there; None tries that of this process, then others.
        nonce: what marks our lines of this connection.
        wanted: what the environment there has to be.
    """
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    return [*ssh, "-T", *options, "--", host, _make_remote_command(python, nonce, wanted)]


def _make_remote_command(python: str | None, nonce: str, wanted: Wanted) -> str:
    """Return what the login shell there gets, whichever it is: no line breaks, and quotes that all shells know."""
    settings = {
        "nonce": nonce,
        "python": wanted.python,
        "folder": _find_source_folder(),
        "with_ipython": wanted.with_ipython,
        "variable": finder.VARIABLE if wanted.takes_over else "",
    }
    program = base64.b64encode(_BOOTSTRAP.read_bytes()).decode()
    code = f'import base64;exec(base64.b64decode("{program}").decode())'
    text = base64.b64encode(json.dumps(settings).encode()).decode()
    candidates = [python] if python else list(dict.fromkeys([sys.executable, "python3", "python"]))
    places = " ".join(map(_quote_path, candidates))
    script = (
        f'for p in {places}; do command -v "$p" >/dev/null 2>&1 || continue; '
        f'"$p" -c {shlex.quote(code)} {text}; s=$?; [ $s = {NO_PACKAGE} ] || exit $s; done; exit {NO_PACKAGE}'
    )
    return f"exec sh -c {shlex.quote(script)} {_OURS}"


def _quote_path(path: str) -> str:
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def _find_source_folder() -> str:
    """Return the folder that this package runs from, empty where it is installed: a host that has it uses it too."""
    folder = Path(__file__).resolve().parents[4]
    return "" if any(part in _INSTALLED for part in folder.parts) else str(folder)


def explain_failure(host: str, code: int | None, said: Sequence[str]) -> str:
    """Return why a client has failed, as a sentence.

    Args:
        host: where it should have gone.
        code: its exit code; None where it has not ended.
        said: the lines that it has written to its errors.
    """
    text = "\n".join(said)
    bare = host.rpartition("@")[2]
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in text:
        return (
            f"host {host}: its host key is not the one that ~/.ssh/known_hosts has: if that is right, remove the old "
            f"one by `ssh-keygen -R {bare}`, and run `ssh {host}` once in a terminal"
        )
    if "Host key verification failed" in text:
        return f"host {host}: its host key is unknown here: run `ssh {host}` once in a terminal, and accept the key"
    if "Permission denied" in text or "Too many authentication failures" in text:
        line = next(line for line in said if "Permission denied" in line or "Too many" in line)
        return (
            f"host {host}: ssh would have to ask for a password or passphrase ({line}): give it a key that needs none, "
            "or load the key into ssh-agent by `ssh-add`"
        )
    telling = find_telling_line(said)
    if code is None:  # it gives up by itself where it does not connect
        return (
            f"host {host}: ssh still runs, and no Python has started there ({telling or 'nothing was said'}): try "
            f"`ssh {host} python3 -V`. What a shell runs at its start, such as ~/.bashrc, must not read the input, and "
            "a ForceCommand of the server has to run the command"
        )
    if code == 255:
        return f"host {host}: ssh does not reach it ({telling or 'it says nothing'})"
    return f"host {host}: ssh ended with code {code} ({telling or 'it says nothing'})"


def find_telling_line(said: Sequence[str]) -> str:
    """Return the line of a client's errors that says most: the last one, banners and remarks left out."""
    lines = [line.strip() for line in said if line.strip() and not line.startswith("Warning: Permanently")]
    telling = [
        line for line in lines if re.search(r"ssh:|kex_|onnect|esolve|imed? ?out|rror|not found", line)
    ]
    return (telling or lines or [""])[-1][:300]


def find_mismatches(host: str, facts: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """Return what is wrong with the environment of a host, a sentence each.

    Args:
        host: as ssh's command line takes it.
        facts: what the bootstrap there has said.
        wanted: what is needed.
    """
    where = f"host {host}: {facts.get('executable', 'python')}"
    if facts.get("python", "").rpartition(".")[0] != wanted.python:
        return [
            f"{where} is Python {facts.get('python')}, and this process Python {wanted.python}: name the right one, "
            f"python={{{host!r}: '/path/to/python{wanted.python}'}}"
        ]
    if facts.get("missing"):
        return [
            f"{where} does not have {facts['missing']}: install it there, or name the Python that has it, "
            f"python={{{host!r}: '/path/to/python'}}"
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


def find_client(ssh: Sequence[str], search: str | None) -> bool:
    """Return whether the client is there; `search` is the path of folders with programs."""
    import shutil

    return shutil.which(ssh[0], path=search if search is not None else os.defpath) is not None
