"""Small messages between ranks of one machine, by a socket for each pair of them: several times as fast as gloo."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hmac
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_BYTES: Final = 65_536
"""Size up to which a message goes this way."""
_SEND_BUFFER: Final = 3 * MAX_BYTES
"""Bytes, of several messages: a rank sends without waiting for one that has not read the last ones."""
MAX_RANKS: Final = 8
"""Ranks up to which each has a socket to every other."""

_LAST: Final = 2**62
"""Number of the packet of a rank that ends all exchanges; in the place of a size is the rank because of which."""
OVER_GROUP: Final = -1
"""Size that a rank states whose message cannot go this way."""
_LONGEST_WAIT_S: Final = 86_400.0
"""Seconds that a call may wait: the system takes no week."""
_AT_ONCE: Final = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
_NEXT_STEP: Final = "destroy it and open a new one on every rank, or start the processes again"

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


class _Part(ctypes.Structure):
    """Memory of a part of a packet, as readv takes it."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Exchange:
    """An exchange that has begun, and has not ended.

    Attributes:
        number: among all of this group.
        stated: bytes of this rank's message; `OVER_GROUP` where it is not to go this way.
        target: address of the memory for all messages.
        message: the packet, in parts.
        kept: what the addresses belong to.
        deadline: when to give up; None before the first wait.
        has_failed: whether the process group has refused this rank's message, and waits for another one.
    """

    __slots__ = ("deadline", "has_failed", "kept", "message", "number", "stated", "target")

    def __init__(self, number: int, stated: int, own: int, target: int, kept: Any) -> None:
        self.number = number
        self.stated = stated
        self.target = target
        self.kept = kept
        self.deadline: float | None = None
        self.has_failed = False
        self.message: list[Any] = [_HEADER.pack(number, stated)]
        if 0 < stated <= MAX_BYTES:
            self.message.append((ctypes.c_char * stated).from_address(own))


class LocalSockets:
    """Exchanges messages of one size between all ranks.

    A message is a packet with its number and size. What a rank cannot send this way, or is too large, is a packet
    without content: then all ranks know that this message goes over the process group.

    An exception such as that of an interrupt may end an exchange on one rank. What that rank has to send is sent then,
    and the exchange stays in `pending`, for `finish`. An exchange that ranks number differently, or that breaks, is the
    last one: all ranks raise from then on.

    One thread at a time may use this, and not while its `exchange` or `finish` runs further out.

    Args:
        rank: of this process.
        peers: a connected socket for each other rank.
        timeout_s: seconds that an exchange may take.

    Attributes:
        num_exchanges: that began so far.
        pending: the one that has begun, and has not ended; None where all have.
        broken: why there are no more; empty where there are.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._headers = {other: bytearray(_HEADER.size) for other in self._peers}
        # C's own readv returns when a signal has come: Python's calls would begin the whole wait anew
        self._readv: Any = ctypes.CDLL(None, use_errno=True).readv
        self._readv.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_int
        self._readv.restype = ctypes.c_ssize_t
        self._parts = {other: _make_parts(header) for other, header in self._headers.items()}
        self._bodies: dict[int, Any] = {other: parts[1] for other, parts in self._parts.items()}
        self._reads = {
            other: (peer.fileno(), ctypes.addressof(self._parts[other]))
            for other, peer in self._peers.items()
        }
        self.num_exchanges = 0
        self.pending: _Exchange | None = None
        self.broken = ""
        limit = struct.pack("ll", *divmod(max(1, int(timeout_s * 1_000_000)), 1_000_000))
        for peer in self._peers.values():
            peer.setblocking(True)
            # what settimeout does costs a call each time
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        # the connections end with this object, also where processes that were forked have the sockets too
        self.close = weakref.finalize(self, _end, list(self._peers.values()), self._pid, close=True)

    def exchange(self, own: int, stated: int, target: int, kept: Any = None) -> bool:
        """Write the messages of all ranks one after the other, in rank order.

        Args:
            own: address of this rank's message.
            stated: bytes of a message, of every rank; `OVER_GROUP` where this rank's cannot go this way.
            target: address of the memory for all messages.
            kept: what these addresses belong to.

        Returns:
            False where all messages have to go over the process group. The exchange stays pending: `settle` ends it.

        Raises:
            RuntimeError: a rank has gone, has not come in time, or has passed another size; this process was forked.
        """
        self.refuse_if_forked()
        if self.broken:
            raise RuntimeError(
                f"this process group cannot gather any more, because {self.broken}; {_NEXT_STEP}"
            )
        begun = _Exchange(self.num_exchanges + 1, stated, own, target, kept)
        try:
            self.pending = begun
            self.num_exchanges = begun.number
            for rank, peer in self._peers.items():
                self._send(begun, rank, peer)
        except BaseException:
            if self.pending is begun:  # an interrupt: the others will count on this rank
                self._send_again(begun)
            raise
        if 0 < stated <= MAX_BYTES:
            ctypes.memmove(target + self._rank * stated, own, stated)
        return self.finish()

    def finish(self) -> bool:
        """Receive what is missing of the pending exchange; see `exchange`."""
        self.refuse_if_forked()
        pending = self.pending
        assert pending is not None
        pending.deadline = time.monotonic() + self._timeout_s
        sizes = [pending.stated]
        for rank, peer in self._peers.items():
            sizes.append(self._receive(pending, rank, peer))
        if sizes.count(pending.stated) == len(sizes):
            if not 0 <= pending.stated <= MAX_BYTES:
                return False
            self.pending = None
            return True
        self._compare(dict(zip((self._rank, *self._peers), sizes, strict=True)))
        return False

    def refuse_if_forked(self) -> None:
        """Raise RuntimeError in a process that was forked: the messages are its parent's."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this process was forked from rank {self._rank}, and cannot gather for it: gather in the rank itself"
            )

    def settle(self) -> None:
        """Note that the pending exchange has ended: the process group has begun to gather its messages."""
        self.pending = None

    def shut_down(self) -> None:
        """End the exchange in which a thread waits, here and on the other ranks."""
        _end(list(self._peers.values()), self._pid, close=False)

    def _send(self, begun: _Exchange, rank: int, peer: socket.socket) -> None:
        while True:
            try:
                peer.sendmsg(begun.message, (), _AT_ONCE)
                return
            except BlockingIOError:
                self._wait(begun, rank, peer, for_room=True)
            except OSError as error:
                raise self._lose(rank, peer, error.strerror) from error

    def _send_again(self, begun: _Exchange) -> None:
        """Send what an interrupt may have left unsent; who has it drops the second one."""
        self.num_exchanges = begun.number
        try:
            for peer in self._peers.values():
                peer.sendmsg(begun.message, (), _AT_ONCE)
        except OSError as error:
            self._break(
                f"an exception ended a gather of rank {self._rank} on its way: {error.strerror}", self._rank
            )

    def _receive(self, pending: _Exchange, rank: int, peer: socket.socket) -> int:
        """Receive the message of a rank, if it was not received yet; return the size that the rank states."""
        header = self._headers[rank]
        number, stated = _HEADER.unpack(header)
        if number < pending.number:
            descriptor, address = self._reads[rank]
            size = pending.stated if 0 < pending.stated <= MAX_BYTES else 0
            if size:
                body = self._bodies[rank]
                body.base, body.size = pending.target + rank * size, size
            # the number is read from memory: an interrupt may come between the call and what is done with its result
            while number < pending.number:
                read = self._readv(descriptor, address, 2 if size else 1)
                if read < 0:
                    code = ctypes.get_errno()
                    if code not in (errno.EINTR, errno.EAGAIN):
                        raise self._lose(rank, peer, os.strerror(code))
                    self._wait(pending, rank, peer)
                elif read == 0:
                    raise self._break(
                        f"Connection closed by peer: rank {rank} has left before this gather", rank
                    )
                number, stated = _HEADER.unpack(header)
        if number == _LAST:
            raise self._follow(rank, stated)
        if number > pending.number:
            raise self._break(
                f"rank {rank} is at gather {number}, this rank {self._rank} at {pending.number}: an exception has "
                "ended an earlier one on some ranks only",
                rank,
            )
        return int(stated)

    def _wait(self, pending: _Exchange, rank: int, peer: socket.socket, *, for_room: bool = False) -> None:
        """Wait until a rank has sent or read something; RuntimeError where the exchange takes too long."""
        now = time.monotonic()
        if pending.deadline is None:
            pending.deadline = now + self._timeout_s
        left_s = pending.deadline - now
        if left_s <= 0:
            raise self._break(
                f"Timed out waiting {self._timeout_s:g} s for rank {rank} to enter a gather", rank
            )
        poll = select.poll()
        poll.register(peer, select.POLLOUT if for_room else select.POLLIN)
        poll.poll(min(left_s, _LONGEST_WAIT_S) * 1000)  # after a signal Python waits for the rest of it only

    def _compare(self, sizes: dict[int, int]) -> None:
        """Raise RuntimeError, on every rank, where messages differ in size."""
        known = {rank: size for rank, size in sorted(sizes.items()) if size != OVER_GROUP}
        if len(set(known.values())) < 2:
            return
        self.pending = None
        first = self._rank if self._rank in known else min(known)
        here = f"this rank {first}" if first == self._rank else f"rank {first}"
        other = next(rank for rank, size in known.items() if size != known[first])
        raise RuntimeError(
            f"rank {other} gathers {known[other]} bytes, {here} {known[first]}: a gather takes tensors of the same "
            "shape and dtype on every rank; see pad_across_processes, or set ACCELERATE_DEBUG_MODE=1"
        )

    def _lose(self, rank: int, peer: socket.socket, reason: str | None) -> RuntimeError:
        """Return the error for a connection that is lost, which names the rank that was the first to go."""
        while True:
            try:
                packet = peer.recv(_HEADER.size, _AT_ONCE)
            except ConnectionResetError:  # said once, where the other rank has not read all
                continue
            except OSError:
                packet = b""
            if len(packet) < _HEADER.size:
                return self._break(f"the connection to rank {rank} is lost: {reason}", rank)
            number, because = _HEADER.unpack(packet)
            if number == _LAST:
                return self._follow(rank, because)

    def _follow(self, rank: int, because: int) -> RuntimeError:
        """Return the error for a rank that has ended all exchanges because of a rank."""
        return self._break(
            f"Connection closed by peer: rank {rank} has ended gathers because of "
            f"{'this ' if because == self._rank else ''}rank {because}",
            because,
        )

    def _break(self, reason: str, because: int) -> RuntimeError:
        """Make this exchange the last one, also of the other ranks, and return the error.

        Args:
            reason: what has happened.
            because: the rank that the others are to name.
        """
        self.broken, self.pending = reason, None
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(_HEADER.pack(_LAST, because), _AT_ONCE)
        self.shut_down()
        return RuntimeError(reason)


def _make_parts(header: bytearray) -> Any:
    """Return the parts of a packet: a header, and a body that each exchange places."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(header))
    return (_Part * 2)(_Part(base, len(header)), _Part(None, 0))


def _end(peers: list[socket.socket], pid: int, *, close: bool) -> None:
    for peer in peers:
        if os.getpid() == pid:  # the connections of who was forked are its parent's
            with contextlib.suppress(OSError):  # the other rank has gone
                peer.shutdown(socket.SHUT_RDWR)
        if close:
            peer.close()


def connect(
    rank: int,
    world_size: int,
    all_gather_object: Callable[[Any], list[Any]],
    timeout_s: float,
    *,
    willing: bool = True,
) -> LocalSockets | None:
    """Connect all ranks; every rank calls this, and all get sockets or none does.

    Args:
        rank: of this process.
        world_size: number of ranks.
        all_gather_object: returns the objects of all ranks.
        timeout_s: for the exchanges.
        willing: False where this rank must not have sockets, so that none gets them.

    Returns:
        None where the ranks are not on one machine, it has no such sockets, or a rank is not willing.
    """
    peers: dict[int, socket.socket] = {}
    try:
        with _listen(world_size) as listener:
            addresses: list[_Address | None] = all_gather_object(_make_address(listener) if willing else None)
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
        sockets = None
        with contextlib.suppress(OSError):
            complete = peers.keys() == set(range(world_size)) - {rank}
            if complete and all(map(_has_room, peers.values())):
                sockets = LocalSockets(rank, dict(sorted(peers.items())), timeout_s)
        if not all(all_gather_object(sockets is not None)):  # the last step: from here on all ranks have them
            return None
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
