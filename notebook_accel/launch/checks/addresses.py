"""Addresses, ports and network interfaces of this machine, and how it reaches other hosts."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

_HERE_SECONDS: Final = 2.0
_BACKLOG: Final = 1 << 14  # hosts connect before anybody accepts; the system takes less, 4,096 by default
_LOOPBACK_NAMES: Final = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")


def listen(address: str, port: int) -> socket.socket:
    """Open a socket that listens on this machine.

    Args:
        address: host name or address of this machine; empty listens at all addresses. If a name has several addresses,
            the first IPv4 one is used.
        port: port number; 0 is any free port.

    Returns:
        The listening socket. The caller closes it.

    Raises:
        OSError: the address is not one of this machine, or the port is in use or not allowed.
        UnicodeError: no host can have such a name.
    """
    found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)


def find_listen_problem(address: str, port: int) -> str:
    """Return why this machine cannot listen at an address and port.

    Args:
        address: host name or address; empty is all addresses of this machine.
        port: port number; 0 is any free port.

    Returns:
        The reason, as part of a sentence; empty if it can listen there.
    """
    try:
        listen(address, port).close()
    except UnicodeError:
        return "no host has such a name"
    except OSError as error:
        reason = error.strerror or str(error)
        return reason.partition(" (while")[0]  # after this Python repeats the address
    return ""


def find_host_problem(host: str) -> str:
    """Return why this machine finds no address of a host.

    Args:
        host: host name or address.

    Returns:
        The reason, as part of a sentence; empty if it finds one.
    """
    try:
        socket.getaddrinfo(host, None)
    except UnicodeError:
        return "no host has such a name"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def find_loopback_interface() -> str | None:
    """Return the name of the loopback network interface; None if the system does not say.

    On a single node Gloo uses this interface. By default it would use the address of the machine's own name, and some
    machines cannot resolve their own name.
    """
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def choose_listen_address(host: str) -> str:
    """Return the address where this machine has to listen, so that others can connect to it.

    On Debian, for example, the hosts file maps the machine's own name to its loopback address. Other machines could not
    connect to a socket that listens there.

    Args:
        host: name or address by which the others know this machine.

    Returns:
        `host`; empty, which is all addresses, if `host` is a loopback address on this machine only.
    """
    is_own_name = is_loopback(host) and not _is_loopback_everywhere(host)
    return "" if is_own_name else host


def _is_loopback_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().partition(".")[0] in _LOOPBACK_NAMES


def listen_for_nodes(host: str, port: int = 0) -> socket.socket:
    """Open a socket that listens, so that other nodes can connect to it, and nobody else as far as that is possible.

    Args:
        host: name or address by which the nodes know this machine. If it is a loopback address, all nodes are on this
            machine.
        port: port number; 0 is any free port.

    Returns:
        A socket that listens at `host` alone if that is an address of this machine. A name may have another address on
        other machines, and an address may lead here from outside: then it listens at all addresses.

    Raises:
        OSError: this machine cannot listen there.
    """
    if is_loopback(choose_listen_address(host)) or (is_address(host) and not find_listen_problem(host, 0)):
        return listen(host, port)
    return listen_everywhere(port)


def listen_everywhere(port: int = 0) -> socket.socket:
    """Open a socket that listens at all addresses of this machine, of IPv4 and IPv6; 0 is any free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def is_address(host: str) -> bool:
    """Return whether a host is an address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def find_public_address(host: str) -> str:
    """Return an address of a host that the whole internet may reach; empty if it has none.

    Args:
        host: host name or address.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    texts = [str(entry[4][0]).partition("%")[0] for entry in found]
    return next((text for text in texts if ipaddress.ip_address(text).is_global), "")


def is_this_machine(host: str, port: int) -> bool:
    """Return whether a connection to a host and port arrives at this machine.

    Args:
        host: host name or address.
        port: port number. No process of this machine may listen there.

    Raises:
        OSError: this machine cannot listen at the port.
    """
    with listen("", port) as listening:
        listening.settimeout(_HERE_SECONDS)
        try:
            with socket.create_connection((host, port), _HERE_SECONDS):
                listening.accept()[0].close()
        except (OSError, UnicodeError):
            return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback addresses.

    Args:
        host: host name or address. An empty one is not a loopback address.
    """
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def find_own_address(host: str) -> str:
    """Return the address of this machine from which it sends to a host.

    Args:
        host: host name or address.

    Returns:
        The address; empty if the host is unknown or there is no route to it.
    """
    try:
        found = socket.getaddrinfo(host.removeprefix("::ffff:"), 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, _, _, where in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(where)  # UDP: this only chooses a route and sends nothing
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def find_interface_to(host: str) -> str | None:
    """Return the name of the network interface through which this machine reaches a host.

    By default Gloo uses the interface of the machine's own name, which need not be in the network of the nodes.

    Args:
        host: host name or address.

    Returns:
        A name such as `eth0`; None if it is not known.
    """
    import psutil

    own = find_own_address(host).partition("%")[0]
    if not own:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return find_loopback_interface()
    entries = psutil.net_if_addrs().items()
    return next(
        (name for name, found in entries if any(entry.address.partition("%")[0] == own for entry in found)),
        None,
    )
