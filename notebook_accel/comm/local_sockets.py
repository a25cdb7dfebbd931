"""Small messages between ranks of one machine, by a socket for each pair of them: several times as fast as gloo."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_BYTES: Final = 65_536
"""Size up to which a message goes this way."""
_SEND_BUFFER: Final = 3 * MAX_BYTES
"""Bytes, of several messages: a rank sends without waiting for one that has not read the last ones."""
MAX_RANKS: Final = 8
"""Ranks up to which each has a socket to every other."""

_HEADER: Final = struct.Struct("=qq")
_GREETING: Final = struct.Struct("=16sq")
_CREDENTIALS: Final = struct.Struct("=iii")
_SETUP_S: Final = 10.0


class _Address(NamedTuple):
    """Where a rank listens.

    Attributes:
        machine: tells machines apart, and network namespaces of one: a name is known in its own only.
        name: of the socket.
        token: who knows it is a rank of the same run.
    """

    machine: str
    name: bytes | str
    token: bytes


class LocalSockets:
    """Exchanges messages of one size between all ranks.

    A message is a packet with its number and size. So nothing has to be repaired where an exception, such as that of an
    interrupt, ends an exchange that every rank begins: packets of it that come later have a lower number and are
    dropped. Where some ranks never begin it, they have lost count of each other, which raises.

    Args:
        rank: of this process.
        peers: a connected socket for each other rank.
        timeout_s: seconds to wait for a rank.

    Attributes:
        num_exchanges: that began so far.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._peers: dict[int, Any] = dict(peers)  # Windows has no sendmsg
        self._timeout_s = timeout_s
        self._header = bytearray(_HEADER.size)
        self._lock = threading.Lock()
        self.num_exchanges = 0
        limit = struct.pack("ll", *divmod(max(1, int(timeout_s * 1_000_000)), 1_000_000))
        for peer in self._peers.values():
            peer.setblocking(True)
            # what settimeout does costs a call each time
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def exchange(self, own: int, size: int, target: int) -> None:
        """Write the messages of all ranks one after the other, in rank order.

        Args:
            own: address of this rank's message.
            size: bytes of a message, of every rank.
            target: address of the memory for all messages.

        Raises:
            RuntimeError: a rank has gone, has not come in time, or has passed another size.
        """
        self._exchange(own, size, target, stated=size)

    def agree_on_size(self, size: int) -> None:
        """Let all ranks compare the size of messages that go another way.

        Args:
            size: bytes of this rank's message.

        Raises:
            RuntimeError: as for `exchange`.
        """
        self._exchange(0, 0, 0, stated=size)

    def _exchange(self, own: int, size: int, target: int, *, stated: int) -> None:
        with self._lock:
            self.num_exchanges += 1
            parts: list[Any] = [_HEADER.pack(self.num_exchanges, stated)]
            if size:
                parts.append((ctypes.c_char * size).from_address(own))
                ctypes.memmove(target + self._rank * size, own, size)
            for rank, peer in self._peers.items():
                try:
                    peer.sendmsg(parts)
                except OSError as error:
                    raise self._explain(rank, error) from error
            for rank, peer in self._peers.items():
                self._receive(rank, peer, size, target + rank * size, stated)

    def _receive(self, rank: int, peer: Any, size: int, target: int, stated: int) -> None:
        parts: list[Any] = [self._header]
        if size:
            parts.append((ctypes.c_char * size).from_address(target))
        number = 0
        while number < self.num_exchanges:
            try:
                read = peer.recvmsg_into(parts)[0]
            except OSError as error:
                raise self._explain(rank, error) from error
            if not read:
                raise RuntimeError(f"Connection closed by peer: rank {rank} has left before this gather")
            number, theirs = _HEADER.unpack(self._header)
        if number > self.num_exchanges:
            raise RuntimeError(
                f"rank {rank} is at gather {number}, this rank {self._rank} at {self.num_exchanges}: an exception has "
                "ended an earlier one on some ranks only"
            )
        if theirs != stated:
            raise RuntimeError(
                f"rank {rank} gathers {theirs} bytes, this rank {self._rank} {stated}: a gather takes tensors of the "
                "same shape and dtype on every rank; see pad_across_processes, or set ACCELERATE_DEBUG_MODE=1"
            )

    def _explain(self, rank: int, error: OSError) -> RuntimeError:
        if isinstance(error, BlockingIOError):
            return RuntimeError(f"Timed out waiting {self._timeout_s:g} s for rank {rank} to enter a gather")
        return RuntimeError(f"the connection to rank {rank} is lost: {error.strerror}")

    def shut_down(self) -> None:
        """End the exchange in which a thread waits, here and on the other ranks."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the other rank has gone
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all sockets, in this process only."""
        for peer in self._peers.values():
            peer.close()


def connect(
    rank: int, world_size: int, all_gather_object: Callable[[Any], list[Any]], timeout_s: float
) -> LocalSockets | None:
    """Connect all ranks; every rank calls this, and all get sockets or none does.

    Args:
        rank: of this process.
        world_size: number of ranks.
        all_gather_object: returns the objects of all ranks.
        timeout_s: for the exchanges.

    Returns:
        None where the ranks are not on one machine, or it has no such sockets.
    """
    peers: dict[int, socket.socket] = {}
    try:
        with _listen(world_size) as listener:
            addresses: list[_Address | None] = all_gather_object(_make_address(listener))
            found = [address for address in addresses if address is not None]
            if listener is None or len({address.machine for address in found}) > 1 or None in addresses:
                return None
            with contextlib.suppress(OSError):
                for other in range(rank):
                    peers[other] = _call(found[other], rank)
            if not all(all_gather_object(len(peers) == rank)):
                return None
            with contextlib.suppress(OSError):
                while len(peers) < world_size - 1:
                    other, accepted = _accept(listener, found[rank].token)
                    peers[other] = accepted
        complete = peers.keys() == set(range(world_size)) - {rank} and all(map(_has_room, peers.values()))
        if not all(all_gather_object(complete)):
            return None
        sockets = LocalSockets(rank, dict(sorted(peers.items())), timeout_s)
        peers = {}
        return sockets
    finally:
        for peer in peers.values():
            peer.close()


@contextlib.contextmanager
def _listen(backlog: int) -> Iterator[socket.socket | None]:
    """Yield a socket that listens under a name of this machine, which is in no folder; None where there is none."""
    if sys.platform != "linux":
        yield None
        return
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        yield None
        return
    with listener:
        try:
            listener.bind("")  # a name that the system chooses, known in the own network namespace only
            listener.listen(backlog)
            listener.settimeout(_SETUP_S)
            name = listener.getsockname()
        except OSError:
            name = ""
        yield listener if name else None


def _make_address(listener: socket.socket | None) -> _Address | None:
    if listener is None:
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        return None
    return _Address(boot + network, listener.getsockname(), os.urandom(16))


def _call(address: _Address, rank: int) -> socket.socket:
    """Return a socket to the rank that listens there; OSError where none of this user's does."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has no such sockets")
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(_SETUP_S)
        peer.connect(address.name)
        if not _is_own(peer):
            raise PermissionError(f"{address.name!r} is of another user")
        peer.send(_GREETING.pack(address.token, rank))
    except BaseException:
        peer.close()
        raise
    return peer


def _accept(listener: socket.socket, token: bytes) -> tuple[int, socket.socket]:
    """Return the next rank that calls, and its socket; others who call are left."""
    while True:
        peer, _ = listener.accept()
        try:
            peer.settimeout(_SETUP_S)
            if _is_own(peer):
                said = peer.recv(_GREETING.size)
                if len(said) == _GREETING.size:
                    their_token, rank = _GREETING.unpack(said)
                    if hmac.compare_digest(their_token, token):
                        return rank, peer
        except BaseException:
            peer.close()
            raise
        peer.close()


def _has_room(peer: socket.socket) -> bool:
    """Give a socket room for several messages; return whether the system allows that."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    # Linux counts what it needs itself, and doubles what it is asked for
    return peer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * _SEND_BUFFER


def _is_own(peer: socket.socket) -> bool:
    """Return True if a process of this user is at the other end."""
    if sys.platform != "linux":
        return False
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
