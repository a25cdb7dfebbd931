"""The user's ssh client: its command lines, and what it means where it fails."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from ..remote.client import CommandClient, Wanted, make_script

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


@dataclass(frozen=True)
class SshClient(CommandClient):
    """OpenSSH's client.

    Attributes:
        words: the client, and options of the user's.
    """

    program: ClassVar[str] = "ssh"
    connection: ClassVar[str] = "ssh connection"
    words: tuple[str, ...]

    def make_command(self, host: str, python: str | None, nonce: str, wanted: Wanted) -> list[str]:
        """Return the command that starts the agent on a host; its login shell, whichever it is, gets one line."""
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        script = make_script(python, nonce, wanted, self.warm_seconds)
        return [*self.words, "-T", *options, "--", host, f"exec sh -c {shlex.quote(script)} {_OURS}"]

    def explain_failure(self, host: str, code: int | None, said: Sequence[str]) -> str:
        """Return why the client has failed, as a sentence."""
        return explain_failure(host, code, said)

    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return the line of the client's errors that says most."""
        return find_telling_line(said)


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
    return f"host {host}: ssh ended with code {code}, and no Python has started there ({telling or 'it says nothing'})"


def find_telling_line(said: Sequence[str]) -> str:
    """Return the line of a client's errors that says most: the last one, banners and remarks left out."""
    lines = [line.strip() for line in said if line.strip() and not line.startswith("Warning: Permanently")]
    telling = [
        line for line in lines if re.search(r"ssh:|kex_|onnect|esolve|imed? ?out|rror|not found", line)
    ]
    return (telling or lines or [""])[-1][:300]
