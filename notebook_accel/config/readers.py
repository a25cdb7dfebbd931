"""Makes of what a file or a flag has the values that the options of a launch are checked as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .argument_checks import SET_BY_LAUNCHES, explain_set_by_launches, find_template_error
from .option import as_text


def join(value: Any) -> Any:
    """Return a number or a list as the text that a flag has for it."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return as_text(value) if is_number or isinstance(value, list) else value


def read_precision(value: Any) -> Any:
    """Return a word of mixed precision; YAML reads an unquoted `no` as False."""
    if isinstance(value, str):
        return value.lower()
    return "no" if value is False or value is None else value


def read_variables(value: Any) -> Any:
    """Return variables with texts: files hold numbers too. What no process can be given is refused."""
    if not isinstance(value, Mapping):
        return value
    for name, text in value.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"has {name!r}, which is no name of a variable")
        if not isinstance(text, (str, bool, int, float)) or "\0" in str(text):
            raise ValueError(f"has {text!r} for {name}, which is no text")
        if name in SET_BY_LAUNCHES:
            raise ValueError(f"has {name}: {explain_set_by_launches(name)}")
    return {name: text if isinstance(text, str) else as_text(text) for name, text in value.items()}


def read_template(value: Any) -> Any:
    """Return a template; what is none is refused."""
    if isinstance(value, str) and (reason := find_template_error(value)):
        raise ValueError(reason)
    return value
