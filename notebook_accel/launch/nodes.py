"""Where the nodes of a run meet, and how many there are: a number, or "min:max" where they may join and leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any, Final

from .addresses import unknown, unusable
from .job import Rendezvous
from .problems import Problems, is_seconds

BACKENDS: Final = ("static", "c10d")
_LEAST_SILENCE: Final = 2.0
_OWN_ARGUMENTS: Final = {"backend", "endpoint", "run_id", "min_nodes", "max_nodes", "rank"}

SETTINGS = ("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt")


def is_range(num_nodes: Any) -> bool:
    """Whether an argument is meant as a range."""
    return isinstance(num_nodes, str) and ":" in num_nodes


def resolved(place: Rendezvous) -> tuple[Rendezvous, str]:
    """Return the rendezvous with numbers instead of a range, and what is wrong with it, empty where nothing is."""
    text = place.num_nodes
    if not isinstance(text, str):
        return place, ""
    wanted = "an integer is needed, or 'min:max' such as '1:4'"
    least, colon, most = (part.strip() for part in text.partition(":"))
    single = replace(place, num_nodes=1, node_rank=0)
    if not colon or not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in (least, most)):
        return single, f"num_nodes={text!r}: {wanted}"
    if int(least) < 1:
        return single, f"num_nodes={text!r}: at least 1 node is needed"
    if int(least) > int(most):
        return single, f"num_nodes={text!r}: the first number is the smaller one, {most}:{least} perhaps"
    ready = replace(place, min_nodes=int(least), num_nodes=int(most))
    return ready, _problem(ready, text)


def spoken(place: Rendezvous) -> str:
    """Return the number of nodes as it was given."""
    return repr(f"{place.min_nodes}:{place.num_nodes}") if place.is_elastic else str(place.num_nodes)


def _lost_too_soon(settings: Mapping[str, Any]) -> str:
    interval, beats = settings.get("keep_alive_interval", 2.0), settings.get("keep_alive_max_attempt", 3)
    if not is_seconds(interval) or not isinstance(beats, Integral) or interval * int(beats) >= _LEAST_SILENCE:
        return ""
    return (
        f"rdzv_conf={settings!r}: keep_alive_interval x keep_alive_max_attempt = {interval * int(beats):g} s, "
        f"after which a node counts as lost: at least {_LEAST_SILENCE:g} s are needed, nodes look once a second"
    )


def _problem(place: Rendezvous, text: str) -> str:
    if place.backend == "static":
        given = f"num_nodes={text!r} with rdzv_backend={place.backend!r}"
        return f"{given}: nodes join and leave under 'c10d', leave rdzv_backend out"
    unknown = sorted(str(name) for name in set(place.settings or {}) - set(SETTINGS))
    if unknown:
        return f"rdzv_conf={place.settings!r} with num_nodes={text!r}: {unknown[0]} is none of {', '.join(SETTINGS)}"
    return ""


def check(problems: Problems, place: Rendezvous) -> None:
    """Note what is wrong with where nodes meet."""
    problems.one_of("rdzv_backend", place.backend, BACKENDS)
    _check_settings(problems, place.settings)
    texts = {"master_addr": place.address, "rdzv_endpoint": place.endpoint, "rdzv_id": place.run_id}
    for name, text in texts.items():
        if not isinstance(text, str):
            problems.type(f"{name}={text!r}: a string is needed")
        elif "\0" in text or not text.isprintable():
            problems.value(f"{name}={text!r}: printable characters are needed")
        elif not text and name == "master_addr":
            problems.value("master_addr='': a host name or address is needed")
    number, rank = place.num_nodes, place.node_rank
    if problems.integer("num_nodes", number, 1) & problems.integer("node_rank", rank, 0):
        if rank >= number:
            meaning = ", where 0 is the node that holds the store" if place.is_elastic else ""
            problems.value(
                f"node_rank={rank} with num_nodes={spoken(place)}: legal are 0 to {number - 1}{meaning}"
            )
        _check_port(problems, place)


def _check_settings(problems: Problems, settings: Any) -> None:
    if settings is None:
        return
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        problems.type(f"rdzv_conf={settings!r}: a dict is needed, its keys are names")
        return
    for name in _OWN_ARGUMENTS & set(settings):
        problems.value(f"rdzv_conf={settings!r}: {name} is set by an argument of the launch")
    for name in {"timeout", "join_timeout", "last_call_timeout", "keep_alive_interval"} & set(settings):
        if not is_seconds(settings[name]):
            problems.value(f"rdzv_conf={settings!r}: {name} is a number of seconds, more than 0")
    beats = settings.get("keep_alive_max_attempt", 1)
    if isinstance(beats, bool) or not isinstance(beats, Integral) or int(beats) < 1:
        problems.value(f"rdzv_conf={settings!r}: keep_alive_max_attempt is an integer, at least 1")
    elif text := _lost_too_soon(settings):
        problems.value(text)


def _check_port(problems: Problems, place: Rendezvous) -> None:
    port = parse_port(place.port)
    if port is None:
        problems.value(f"use_port={place.port!r}: a port from 0 to 65535 is needed, or None for a free one")
    elif port == 0 and (place.num_nodes > 1 or place.is_elastic) and not place.endpoint:
        problems.value(
            f"use_port={place.port!r} with num_nodes={spoken(place)}: the nodes must agree on a port, name one"
        )
    elif port and _opens_port(place) and (reason := unusable("", port)):
        alone = place.num_nodes == 1
        step = "leave use_port out and a free one is used" if alone else "name another one on all nodes"
        problems.value(f"use_port={place.port!r}: the port cannot be opened ({reason}); {step}")
    if place.num_nodes == 1 and isinstance(place.address, str) and (reason := unusable(place.address, 0)):
        problems.value(
            f"master_addr={place.address!r} is no address of this machine ({reason}); "
            "leave master_addr out for a run on one node"
        )
    several = place.num_nodes > 1 and not place.endpoint
    if several and place.address and isinstance(place.address, str) and (reason := unknown(place.address)):
        problems.value(f"master_addr={place.address!r}: this machine finds no such host ({reason})")
    if place.endpoint and isinstance(place.endpoint, str):
        host, _, digits = place.endpoint.rpartition(":")
        if not host or not digits.isdecimal() or not parse_port(digits):
            problems.value(f"rdzv_endpoint={place.endpoint!r}: host:port is needed, a port from 1 to 65535")
        elif reason := unknown(host.strip("[]")):
            problems.value(f"rdzv_endpoint={place.endpoint!r}: this machine finds no such host ({reason})")


def _opens_port(place: Rendezvous) -> bool:
    """Whether this node alone can be the one that opens the port; under c10d another one of this machine may have."""
    return place.num_nodes == 1 or (place.backend == "static" and place.node_rank == 0)


def parse_port(use_port: Any) -> int | None:
    """Return the port, 0 for any free one, None where it is no port."""
    if use_port is None:
        return 0
    if isinstance(use_port, str) and use_port.isdecimal() and len(use_port) < 20:
        use_port = int(use_port)
    if isinstance(use_port, bool) or not isinstance(use_port, Integral):
        return None
    use_port = int(use_port)
    return use_port if 0 <= use_port <= 65535 else None
