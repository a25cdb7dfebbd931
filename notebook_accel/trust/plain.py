"""Dataclasses as JSON and back, for what unknown peers say: the reader names the type, and nothing else can come out.

Known are None, truth values, numbers, texts, bytes, dataclasses, and tuples, sequences and mappings of them.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from ..events import Pickle

_MAX_INTEGER: Final = 1 << 63
_UNIONS: Final = (Union, types.UnionType)
_MAX_TEXT: Final = 1 << 18
"""Longer texts of a peer without a proof are cut; who has many texts to send has to look at their sum as well."""
_MAX_DEPTH: Final = 60
_CONTROLS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class MalformedError(ValueError):
    """Bytes of a peer that are not what it has to say."""


def is_plain(value: object) -> bool:
    """Return whether a value is None, a truth value, a text, or a number that all readers take."""
    if type(value) is int:
        return -_MAX_INTEGER <= value < _MAX_INTEGER
    return value is None or type(value) in (bool, str, float)


def encode(kind: Any, value: Any, *, proven: bool) -> str:
    """Return a value as text.

    Args:
        kind: its type, as in an annotation.
        value: of that type.
        proven: whether reader and writer prove a secret to each other. Without, pickles are left out.
    """
    return json.dumps(_dump(kind, value, proven))


def load(kind: Any, data: Any, *, proven: bool) -> Any:
    """Return the value of what JSON says.

    Args:
        kind: its type.
        data: texts, numbers, lists and dicts.
        proven: as for `encode`.

    Raises:
        MalformedError: it says no such value.
    """
    try:
        return _load(kind, data, proven, 0)
    except MalformedError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedError(f"{_name(kind)} cannot be read: {error}") from None


def _dump(kind: Any, value: Any, proven: bool) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if (inner := _without_none(kind)) is not kind:
        return _dump(inner, value, proven)
    if kind is Pickle and not proven:
        return None
    if isinstance(value, str):
        return value if proven or len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "..."
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {name: _dump(each, getattr(value, name), proven) for name, each in _fields(kind).items()}
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple and parts[-1] is not Ellipsis:
        return [_dump(part, each, proven) for part, each in zip(parts, value, strict=True)]
    if origin in (tuple, list, Sequence):
        return [_dump(parts[0], each, proven) for each in value]
    assert origin is Mapping, f"{_name(kind)} does not travel"
    return {str(name): _dump(parts[1], each, proven) for name, each in value.items()}


def _load(kind: Any, data: Any, proven: bool, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise MalformedError(f"{_name(kind)} is nested too deeply")
    if (inner := _without_none(kind)) is not kind:
        return None if data is None or (inner is Pickle and not proven) else _load(inner, data, proven, depth)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in _UNIONS:
        _check(kind, data, type(data) in parts)
        return _load(type(data), data, proven, depth)
    if origin is Literal:
        return _check(kind, data, isinstance(data, str) and data in parts)
    if kind in (bytes, Pickle):
        return _load_bytes(kind, data, proven)
    if kind is float:
        return float(_check(kind, data, type(data) in (int, float)))
    if kind is None:
        return _check(kind, data, data is None)
    if kind in (bool, int, str):
        in_range = type(data) is not int or -_MAX_INTEGER <= data < _MAX_INTEGER
        _check(kind, data, type(data) is kind and in_range)
        return data if proven or kind is not str else _escape(data)
    depth += 1
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = _fields(kind)
        _check(kind, data, isinstance(data, dict) and data.keys() == fields.keys())
        return kind(**{name: _load(each, data[name], proven, depth) for name, each in fields.items()})
    if origin is Mapping:
        _check(kind, data, isinstance(data, dict))
        return {
            _load(str, name, proven, depth): _load(parts[1], each, proven, depth)
            for name, each in data.items()
        }
    _check(kind, data, isinstance(data, list))
    if origin is tuple and parts[-1] is not Ellipsis:
        return tuple(_load(part, each, proven, depth) for part, each in zip(parts, data, strict=True))
    assert origin in (tuple, list, Sequence), f"{_name(kind)} does not travel"
    made = [_load(parts[0], each, proven, depth) for each in data]
    return tuple(made) if origin is tuple else made


def _escape(text: str) -> str:
    """Return a text of a stranger as every terminal and page can show it: what moves the cursor comes as an escape."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _load_bytes(kind: Any, data: Any, proven: bool) -> bytes:
    _check(kind, data, isinstance(data, str) and (proven or kind is bytes))
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise MalformedError(f"bytes cannot be read: {error}") from None


def _without_none(kind: Any) -> Any:
    """Return the type without its None; a type that has none is returned as it is."""
    if get_origin(kind) not in _UNIONS or type(None) not in get_args(kind):
        return kind
    parts = [part for part in get_args(kind) if part is not type(None)]
    return functools.reduce(lambda one, other: one | other, parts)


@functools.cache
def _fields(kind: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _check(kind: Any, data: Any, is_right: bool) -> Any:
    if not is_right:
        raise MalformedError(f"{_name(kind)} was expected, not {type(data).__name__}")
    return data


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
