"""Sentences for wrong values: the same one in the file, on the command line, in the questionnaire and in the form."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from ..errors import ConfigError, Problem
from .option import Option, as_text


class Checkable(Protocol):
    """A config that knows which of its options contradict each other."""

    def misfits(self) -> Iterator[str]:
        """Yield a sentence for each pair of options that contradict each other; it begins with the name of one."""


Config = TypeVar("Config", bound=Checkable)


def validate(make: Callable[[Any], Config], values: Mapping[str, Any], options: Sequence[Option]) -> Config:
    """Return the config that `make` builds from nested values.

    Args:
        make: pydantic's validation.
        values: of options, and of sections of options.
        options: all that there are.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    problems = [*_find_unknown(values, options), *_find_truth_values(values, options)]
    try:
        config = make(_without(values, problems))
    except ValidationError as error:
        raise ConfigError([*problems, *_explain(error, options)]) from None
    problems += [Problem(name=text.partition(" ")[0], text=text) for text in config.misfits()]
    if problems:
        raise ConfigError(problems)
    return config


def _find_unknown(values: Mapping[str, Any], options: Sequence[Option]) -> Iterator[Problem]:
    """Yield a problem for each name that no option has, with the nearest name that one has."""
    known = {option.path for option in options}
    sections = {path[:1] for path in known if len(path) > 1}
    for name, value in values.items():
        if (name,) in known:
            continue
        if (name,) not in sections:
            yield _unknown((str(name),), [path[0] for path in known], options)
        elif isinstance(value, Mapping):
            names = [path[1] for path in known if path[0] == name and len(path) > 1]
            for key in value:
                if (name, key) not in known:
                    yield _unknown((name, str(key)), names, options)


def _find_truth_values(values: Mapping[str, Any], options: Sequence[Option]) -> Iterator[Problem]:
    """Yield a problem for each truth value where a number belongs: pydantic counts with them."""
    for option in options:
        value: Any = values
        for name in option.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, bool) and option.kind in (int, float) and option.choices is None:
            reason = "no whole number" if option.kind is int else "no number"
            yield Problem(name=option.name, text=f"{option.path[-1]} {value} is {reason}")


def _explain(error: ValidationError, known: Sequence[Option]) -> list[Problem]:
    """Return a problem for each of pydantic's errors, one for each option."""
    options = {option.path: option for option in known}
    found: dict[tuple[str, ...], Problem] = {}
    for detail in error.errors(include_url=False):
        path = tuple(str(part) for part in detail["loc"])
        while path and path not in options and len(path) > 1:
            path = path[:-1]  # the kinds of a union have places of their own
        if path in found:
            continue
        option = options.get(path)
        value = detail["input"]
        if not path:
            found[path] = Problem(name="", text=_own_words(detail))
        elif option is None:
            found[path] = Problem(
                name=".".join(path), text=f"{path[0]} is a section of options, not {value!r}"
            )
        else:
            found[path] = Problem(
                name=option.name,
                text=f"{path[-1]} {_shorten(_number(option, value))} {_reason(option, detail)}",
            )
    return list(found.values())


def _reason(option: Any, detail: Any) -> str:
    if option.choices is not None:
        return f"is none of {', '.join(map(as_text, option.choices))}"
    limits = {"greater_than_equal": ("ge", "less than"), "greater_than": ("gt", "not more than")}
    limits |= {"less_than_equal": ("le", "more than"), "less_than": ("lt", "not less than")}
    if detail["type"] in limits:
        key, words = limits[detail["type"]]
        return f"is {words} {_number(option, detail['ctx'][key])}"
    kinds = {bool: "neither true nor false", int: "no whole number", float: "no number", str: "no text"}
    if detail["type"] == "string_pattern_mismatch":
        return f"does not look like {option.help.partition(', such as ')[2].rstrip('.') or option.help.rstrip('.')}"
    if detail["type"] == "value_error":
        return _own_words(detail)
    return f"is {kinds.get(option.kind, 'no list of such values')}"


def _own_words(detail: Any) -> str:
    return str(detail.get("ctx", {}).get("error", detail["msg"]))


def _number(option: Any, value: Any) -> Any:
    """Return the number that a text spells, where the option is a number: flags give texts, files numbers."""
    found = value
    if isinstance(value, str) and option.kind in (bool, int, float):
        with contextlib.suppress(ValueError):
            found = float(value)
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown(path: tuple[str, ...], names: list[str], options: Sequence[Option]) -> Problem:
    elsewhere = [option.name for option in options if option.path[-1] == path[-1]]
    near = elsewhere or difflib.get_close_matches(path[-1], names, n=1, cutoff=0.6)
    hint = f", did you mean {near[0]}?" if near else ""
    return Problem(name=".".join(path), text=f"{'.'.join(path)} is no option{hint}")


def _without(values: Mapping[str, Any], problems: Iterable[Problem]) -> dict[str, Any]:
    """Return the values without those that have a problem, so that pydantic checks the others too."""
    names = {problem.name for problem in problems}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if str(name) in names:
            continue
        kept[name] = value
        if isinstance(value, Mapping):
            kept[name] = {key: inner for key, inner in value.items() if f"{name}.{key}" not in names}
    return kept
