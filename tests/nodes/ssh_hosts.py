"""Hosts that OpenSSH reaches: network namespaces with an sshd each, and one for the notebook."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from tests.nodes.network import Network, why_not
from tests.notebooks.kernel import Kernel
from tests.stopping import stop

SSHD = "/usr/sbin/sshd"
NFT = "/usr/sbin/nft"
KEEPS = {"children": "connections, and what waits on the hosts, stay for the next launch"}
_SERVER = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/id.pub
PasswordAuthentication no
StrictModes no
PidFile none
UsePAM no
UseDNS no
SetEnv NOTEBOOK_ACCEL_STATE={folder}/state
"""
_NOISY = "ForceCommand echo 'Welcome to this host'; exec /bin/sh -c \"$SSH_ORIGINAL_COMMAND\"\n"
_CLIENT = """
Host node1 node2
    User root
    IdentityFile {folder}/id
Host locked
    HostName {addresses[1]}
    User root
    HostKeyAlias node1
    IdentityFile /dev/null
Host unknown
    HostName {addresses[1]}
    HostKeyAlias nobody
Host node1
    HostName {addresses[1]}
Host node2
    HostName {addresses[2]}
Host *
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile /dev/null
"""


_FIREWALL = """
add table inet firewall
add chain inet firewall input {{ type filter hook input priority 0; }}
add rule inet firewall input iif lo accept
add rule inet firewall input tcp dport 22 accept
add rule inet firewall input {sources} tcp flags & (syn | ack) == syn drop
"""


def why_no_hosts() -> str:
    """Return why there can be no hosts here; empty where there can."""
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        return "needs OpenSSH's client and server (apt packages openssh-client and openssh-server)"
    return why_not()


@dataclass
class SshHosts:
    """Hosts `node1` and `node2`, which greet whoever comes, and a notebook's machine, all on one bridge.

    Attributes:
        network: of all machines; the notebook is on the first.
        folder: has keys and settings.
    """

    network: Network
    folder: Path
    _servers: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the notebook: `ssh` there is the client with a config for these hosts."""
        return {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    @property
    def state(self) -> Path:
        """The folder of runs that outlive their notebooks, on all hosts."""
        return self.folder / "state"

    @property
    def prefix(self) -> list[str]:
        """Words before a command that runs on the notebook's machine."""
        return ["ip", "netns", "exec", self.network.names[0]]

    def start(self) -> None:
        """Start the servers, and wait until they listen."""
        folder = self.folder
        for name in ("host", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        key = (folder / "host.pub").read_text()
        (folder / "known").write_text(
            "".join(f"{name} {key}" for name in ("node1", *self.network.addresses[1:]))
        )
        (folder / "client").write_text(_CLIENT.format(folder=folder, addresses=self.network.addresses))
        (folder / "server").write_text(_SERVER.format(folder=folder) + _NOISY)
        write_client(folder / "bin", folder / "client")
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.network.names[1:]:
            self._servers.append(self._serve(name))
        for server in self._servers:
            assert server.stderr is not None
            _wait_for_line(server.stderr, "Server listening")

    def _serve(self, name: str) -> subprocess.Popen[str]:
        inside = ["ip", "netns", "exec", name]
        command = [*inside, SSHD, "-D", "-e", "-f", str(self.folder / "server"), "-p", "22"]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    @contextmanager
    def server_gone(self, node: int) -> Iterator[None]:
        """Let a host take no connections meanwhile, and end those that it has."""
        _kill(self._servers[node])
        try:
            yield
        finally:
            self._servers[node] = again = self._serve(self.network.names[1 + node])
            assert again.stderr is not None
            _wait_for_line(again.stderr, "Server listening")

    def stop(self) -> None:
        """End the servers, and the connections that they still serve."""
        for server in self._servers:
            _kill(server)

    @contextmanager
    def firewall(self, *, between_hosts: bool) -> Iterator[None]:
        """Let no machine take connections from others meanwhile, but for ssh's port.

        Args:
            between_hosts: whether hosts take none of each other either.
        """
        notebook = self.network.addresses[0]
        try:
            for node, name in enumerate(self.network.names):
                text = _FIREWALL.format(sources="" if between_hosts or node == 0 else f"ip saddr {notebook}")
                subprocess.run(
                    ["ip", "netns", "exec", name, NFT, "-f", "-"], input=text, text=True, check=True
                )
            yield
        finally:
            for name in self.network.names:
                subprocess.run(["ip", "netns", "exec", name, NFT, "flush", "ruleset"], check=False)

    def start_kernel(self, folder: Path, settings: str = "") -> Kernel:
        """Start a kernel on the notebook's machine.

        Args:
            folder: for its files.
            settings: of the user's ssh, which count more than those of all.
        """
        environment = self.environment
        if settings:
            (folder / "client").write_text(f"{settings}\nMatch all\nInclude {self.folder / 'client'}\n")
            write_client(folder / "bin", folder / "client")
            environment = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        return Kernel(folder, prefix=self.prefix, transport="ipc", **environment)


def write_client(folder: Path, config: Path) -> None:
    """Write a program `ssh` that is the client with a config of its own."""
    folder.mkdir()
    client = folder / "ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    client.chmod(0o755)


def find_client(kernel: Kernel, host: str) -> psutil.Process:
    """Return the process of ssh that leads from a kernel to a host."""
    children = psutil.Process(kernel.pid).children()
    clients = [child for child in children if child.name() == "ssh" and child.status() != "zombie"]
    return next(client for client in clients if host in client.cmdline())


def _kill(server: subprocess.Popen[str]) -> None:
    stop(server.pid)  # it takes no connection between its children's end and its own
    for child in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    server.kill()
    server.wait()
    assert server.stderr is not None
    server.stderr.close()


def _wait_for_line(file: IO[str], text: str) -> None:
    for line in file:
        if text in line:
            return
    raise AssertionError(f"sshd has ended without {text!r}")


@contextmanager
def make_hosts(folder: Path, count: int = 2) -> Iterator[SshHosts]:
    """Make hosts, and remove them afterwards.

    Args:
        folder: for their files.
        count: how many; those after the second have no names.
    """
    network = Network([f"ns{os.getpid()}n{node}" for node in range(1 + count)], f"ns{os.getpid()}br")
    hosts = SshHosts(network, folder)
    try:
        network.make()
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
        network.remove()
