"""Addresses and ports of this machine."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

_HERE_SECONDS: Final = 2.0
_LOOPBACK_NAMES: Final = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine, at any free port for 0; OSError where it cannot.

    An empty address stands for all of them, a name that stands for several for its first in IPv4.
    """
    found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server((str(where[0]), port), family=family)


def unusable(address: str, port: int) -> str:
    """Return why an address and port of this machine cannot be opened; empty where they can."""
    try:
        listen(address, port).close()
    except UnicodeError:
        return "no host has such a name"
    except OSError as error:
        reason = error.strerror or str(error)
        return reason.partition(" (while")[0]  # Python names the address again there
    return ""


def unknown(host: str) -> str:
    """Return why no address is found for a host; empty where one is."""
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError:
        return "no host has such a name"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, None where this system does not tell.

    Gloo on a single node is told to use it: a machine's own name need not resolve to an address.
    """
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    return next((name for name in ("lo", "lo0") if name in names), None)


def open_to_others(host: str) -> str:
    """Return where to listen so that other machines which know this one by `host` come through; empty for everywhere.

    A machine's own name often stands for its loopback in its own hosts file, as Debian writes it.
    """
    is_own_name = is_loopback(host) and not _is_loopback_everywhere(host)
    return "" if is_own_name else host


def _is_loopback_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().partition(".")[0] in _LOOPBACK_NAMES


def listen_to_others(host: str) -> socket.socket:
    """Return a socket that listens at any free port: at all addresses, where `host` is the loopback at that alone."""
    if is_loopback(open_to_others(host)):
        return listen(host, 0)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def leads_here(host: str, port: int) -> bool:
    """Whether whoever goes to a host and port comes to this machine, where nothing may listen at that port yet."""
    with listen("", port) as door:
        door.settimeout(_HERE_SECONDS)
        try:
            with socket.create_connection((host, port), _HERE_SECONDS):
                door.accept()[0].close()
        except (OSError, UnicodeError):
            return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its loopback interface; empty is no host."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def own_address(host: str) -> str:
    """Return the address by which this machine reaches a host, empty where it cannot tell."""
    try:
        found = socket.getaddrinfo(host.removeprefix("::ffff:"), 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, _, _, where in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(where)  # sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface by which this machine reaches a host, None where it cannot tell.

    Gloo, left to itself, takes the one of the machine's own name, which need not be in the nodes' network at all.
    """
    import psutil

    own = own_address(host).partition("%")[0]
    if not own:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return loopback_interface()
    entries = psutil.net_if_addrs().items()
    return next(
        (name for name, found in entries if any(entry.address.partition("%")[0] == own for entry in found)),
        None,
    )
