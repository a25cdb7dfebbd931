"""How many nodes a run has: a number, or "min:max" where they may join and leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .job import Rendezvous

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


def _problem(place: Rendezvous, text: str) -> str:
    if place.backend == "static":
        given = f"num_nodes={text!r} with rdzv_backend={place.backend!r}"
        return f"{given}: nodes join and leave under 'c10d', leave rdzv_backend out"
    unknown = sorted(str(name) for name in set(place.settings or {}) - set(SETTINGS))
    if unknown:
        return f"rdzv_conf={place.settings!r} with num_nodes={text!r}: {unknown[0]} is none of {', '.join(SETTINGS)}"
    return ""
