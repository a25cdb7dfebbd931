"""The hosts of a launch by ssh: what `hosts=` may be, and what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_MOST: Final = 4096  # ranks of a host
_ODD: Final = frozenset(" '\"`$\\;&<>|(){}")  # a ProxyCommand of the user's may hand a name to a shell
_HOW: Final = "'host', 'user@host', or 'host:4' for four ranks there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host of a launch.

    Attributes:
        name: as ssh's command line takes it: a name of the user's ssh config, `user@host`, an address.
        count: number of ranks; None is one for each GPU, or one.
    """

    name: str
    count: int | None = None


def parse_hosts(hosts: Sequence[str]) -> list[Host]:
    """Return hosts in their order.

    Args:
        hosts: texts such as `gpu1`, `gpu2:4`, `me@10.0.0.7` and `[fe80::1]:2`.

    Raises:
        ValueError: a text is no host.
    """
    return [_parse(text) for text in hosts]


def _parse(text: str) -> Host:
    name, count = text, None
    user, at, place = text.rpartition("@")
    if place.startswith("["):
        inner, bracket, rest = place[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r}: an address in brackets is needed, as in '[fe80::1]:4'")
        name, digits = f"{user}{at}{inner}", rest[1:] if rest else None
    elif place.count(":") > 1:
        digits = None  # an address of IPv6
    else:
        place, colon, digits = place.partition(":")
        name, digits = f"{user}{at}{place}", digits if colon else None
    if "," in text:
        raise ValueError(f"{text!r}, which is several hosts: a list of them is needed, {text.split(',')!r}")
    if "://" in text:
        raise ValueError(f"{text!r}: {_HOW}; ports are named in ~/.ssh/config")
    bare = name.rpartition("@")[2]
    if not bare or (at and not user) or not name.isprintable() or _ODD & set(name):
        raise ValueError(f"{text!r}, which names no host: {_HOW}")
    if name.startswith("-") or bare.startswith("-"):
        raise ValueError(f"{text!r}, which would be an option of ssh: {_HOW}")
    if digits is not None:
        if not (digits.isascii() and digits.isdecimal() and 0 < int(digits[:9]) <= _MOST):
            raise ValueError(
                f"{text!r}: {digits!r} is no number of ranks, 1 to {_MOST}; ports are named in ~/.ssh/config"
            )
        count = int(digits)
    return Host(name=name, count=count)


def read_list(value: Any) -> Any:
    """Return the hosts of texts that may name several, as in `gpu1,gpu2:4`; other values as they are."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return value
    return [host.strip() for text in texts for host in text.split(",")]


def check_hosts(name: str, value: Any) -> Iterator[Exception]:
    """Check hosts: a list of texts, each once."""
    if value is None or value == ():
        return
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        example = read_list(value) if isinstance(value, str) else ["gpu1", "gpu2:4"]
        yield TypeError(f"{name}={value!r}: a list of hosts is needed, as in {example!r}")
        return
    if not value:
        yield ValueError(f"{name}={value!r}: at least one host is needed")
    found = []
    for text in value:
        if not isinstance(text, str):
            yield TypeError(f"{name} has {text!r}: {_HOW} is needed")
            continue
        try:
            found.append(_parse(text).name)
        except ValueError as error:
            yield ValueError(f"{name} has {error}")
    for host, times in Counter(found).items():
        if times > 1:
            yield ValueError(
                f"{name} has {host!r} {times} times: name it once, with the number of its ranks, {host + ':2'!r}"
            )


def check_python(name: str, value: Any) -> Iterator[Exception]:
    """Check the Python of the hosts: a path or command, or a dict of those by host."""
    if value is None:
        return
    paths = value.values() if isinstance(value, Mapping) else [value]
    if isinstance(value, Mapping) and not all(isinstance(host, str) for host in value):
        yield TypeError(f"{name}={value!r}: its keys are hosts")
    for path in paths:
        if not isinstance(path, str):
            yield TypeError(f"{name}={value!r}: the path of a Python is needed, or a dict of them by host")
        elif not path.strip() or not path.isprintable() or path.startswith("-"):
            yield ValueError(f"{name}={path!r}: the path of a Python on the hosts is needed")
