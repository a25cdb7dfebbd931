"""Ranks on hosts that the user's own ssh client reaches; nothing has to run there, and no port here is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..command import CommandEngine
from .command import SshClient


class SshEngine(CommandEngine):
    """Starts ranks on several hosts by the user's own OpenSSH client.

    Its config, agent, jump hosts and ControlMaster count. A connection stays open for the next launch.

    Args:
        hosts: `host`, `user@host` or `host:4` for four ranks; without a number a host has a rank for each GPU, or one.
            None is what the launch says.
        python: path of the Python on all hosts, or a dict of those by host. None tries the path of this process's, then
            `python3` and `python`.
        ssh: the client, and options for it: `("ssh", "-F", "config")`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    name = "ssh"
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "hosts= says which machines, and this notebook drives them all",
        "address": "hosts= says where the ranks run",
        "tpu_mode": "ranks on hosts use GPUs or CPUs",
        "secret": "what is said between notebook and hosts goes through ssh, which proves both ends",
    }

    def __init__(
        self,
        hosts: Sequence[str] | None = None,
        *,
        python: str | Mapping[str, str] | None = None,
        ssh: str | Sequence[str] = "ssh",
    ) -> None:
        words = (ssh,) if isinstance(ssh, str) else tuple(ssh)
        self._set(SshClient(words), words[0], hosts, python)

    def find_problem(self) -> str:
        """Return that there is no client, and where it comes from."""
        problem = super().find_problem()
        return (
            f"{problem}: install OpenSSH's client (openssh-client of apt, openssh-clients of dnf)"
            if problem
            else ""
        )
