"""What a stranger may write, for hypothesis: hostile texts, JSON and changed bytes of what is legal.

The suite tries the same few hundred examples at each run. `FUZZ_EXAMPLES=100000` tries as many new ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_MORE = os.environ.get("FUZZ_EXAMPLES")
_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
Test = TypeVar("Test", bound=Callable[..., Any])


def fuzz(examples: int = 300) -> Callable[[Test], Test]:
    """Return the settings of a fuzzed test.

    Args:
        examples: how many the suite tries; FUZZ_EXAMPLES counts more.
    """
    chosen = settings(
        max_examples=int(_MORE or examples),
        deadline=None,
        derandomize=not _MORE,
        database=None,
        phases=_PHASES,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    seconds: list[Any] = [pytest.mark.timeout(0)] if _MORE else []

    def decorate(test: Test) -> Test:
        for mark in (chosen, *seconds):
            test = mark(test)
        return test

    return decorate


ODD_TEXTS = (
    "",
    "\0",
    "../../../etc/passwd",
    "/dev/zero",
    "~nobody\0",
    "\x1b[2J\x1b]0;title\x07",
    "\x1b[" + "9" * 5_000 + "A",
    "\x1b[" + "9" * 5_000 + "m",
    "\x1b[38;5;" + "9" * 5_000 + "m",
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "${rank} $$ {0} %s",
    "\ud800\udfff",
    "\u202e\u2028",
    "9" * 5_000,
    "x" * 10_000,
    "nan",
    "inf",
    "-1",
    "1e999",
    "²",
    "٣",
)
TEXTS = st.one_of(st.sampled_from(ODD_TEXTS), st.text(st.characters(), max_size=20))
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 1e308, float("nan")]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
ODD_JSON = st.sampled_from(
    [
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a": 1, "a": 2}',
        b"9" * 10_000,
        b"1e999",
        b"NaN",
        b'"\\ud800"',
        b"\xff\xfe",
        b"null",
    ]
)


def write_json(value: Any) -> bytes:
    """Return a value as JSON, also where its texts are no UTF-8 or its numbers very long."""
    return json.dumps(value).encode()


def change_bytes(whole: bytes) -> st.SearchStrategy[bytes]:
    """Return bytes in which some are replaced, removed or put in."""
    place = st.integers(0, len(whole))
    edit = st.tuples(place, st.integers(0, 8), st.binary(max_size=8))

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = whole
        for start, count, more in edits:
            data = data[:start] + more + data[start + count :]
        return data

    return st.lists(edit, min_size=1, max_size=4).map(apply)


def change_parts(tree: Any) -> st.SearchStrategy[Any]:
    """Return JSON's values in which one or two inner ones are something else."""
    paths = list(_list_paths(tree, ()))

    def apply(changes: list[tuple[tuple[Any, ...], Any, str]]) -> Any:
        made = json.loads(json.dumps(tree))
        for path, value, how in changes:
            made = _change(made, path, value, how)
        return made

    change = st.tuples(st.sampled_from(paths), JSON, st.sampled_from(["replace", "remove", "add"]))
    return st.lists(change, min_size=1, max_size=2).map(apply)


def _list_paths(tree: Any, path: tuple[Any, ...]) -> Any:
    yield path
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _list_paths(inner, (*path, name))
    elif isinstance(tree, list):
        for number, inner in enumerate(tree):
            yield from _list_paths(inner, (*path, number))


def _change(tree: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    if not path:
        return value
    place = tree
    try:
        for name in path[:-1]:
            place = place[name]
        if how == "remove":
            del place[path[-1]]
        elif how == "add" and isinstance(place, dict):
            place[str(value)[:20]] = value
        else:
            place[path[-1]] = value
    except (KeyError, IndexError, TypeError):  # an earlier change has taken the place away
        return tree
    return tree


def make_documents(valid: Any) -> st.SearchStrategy[bytes]:
    """Return JSON files: such as `valid`, with other parts, with other bytes, or anything."""
    return st.one_of(
        change_parts(valid).map(write_json),
        change_bytes(write_json(valid)),
        ODD_JSON,
        JSON.map(write_json),
        st.binary(max_size=40),
    )
