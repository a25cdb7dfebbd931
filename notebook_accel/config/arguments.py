"""The arguments of `notebook_launcher` as the table of options has them; pydantic is not needed."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from . import argument_checks
from .argument_checks import ArgumentCheck, Check
from .launch_options import LaunchOptions, SecretOptions
from .option import Option, as_texts, options_of

IMPLIED: Final[Mapping[str, str]] = {"hosts": "ssh", "slurm": "slurm"}
"""Arguments that choose an engine where none is named."""


@functools.cache
def options() -> Mapping[str, Option]:
    """Return the options that `notebook_launcher` takes, by the names of its arguments."""
    return {**of_configs(), **{option.argument: option for option in options_of(SecretOptions)}}


@functools.cache
def of_configs() -> Mapping[str, Option]:
    """Return those of the options that a config may have."""
    return {option.argument: option for option in options_of(LaunchOptions) if option.argument}


def name_as_in_files(text: str) -> str:
    """Return a message about arguments with their names in config files, which are those of flags too.

    Args:
        text: names arguments of `notebook_launcher`.
    """
    others = {name: option.name for name, option in of_configs().items() if name != option.name}
    return re.sub(rf"\b({'|'.join(others)})\b", lambda found: others[found[1]], text)


@functools.cache
def defaults() -> Mapping[str, Any]:
    """Return the default of each argument."""
    return {name: option.argument_default for name, option in options().items()}


@functools.cache
def checks() -> Mapping[str, ArgumentCheck]:
    """Return how each argument is checked by itself: `argument_checks.find_problems` takes them."""
    return {name: _argument_check(option) for name, option in options().items()}


@functools.cache
def variable_names() -> Mapping[str, str]:
    """Return the environment variable that tells workers of an argument, by the name of the argument."""
    return {name: option.face.env for name, option in options().items() if option.face.env}


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that tell workers of arguments.

    Args:
        values: arguments by name. One that is missing, None or the default sets no variable.
    """
    names = {name: env for name, env in variable_names().items() if values.get(name) is not None}
    return as_texts({env: values[name] for name, env in names.items() if values[name] != defaults()[name]})


def legal_words(name: str) -> tuple[str, ...]:
    """Return the words that an argument may have; empty where it may have others, too."""
    return options()[name].choices or ()


def _argument_check(option: Option) -> ArgumentCheck:
    argument = option.row.argument
    assert argument is not None
    decides = argument.variable is not None and option.choices is not None
    return ArgumentCheck(
        default=option.argument_default,
        check=_check(option),
        variable=str(argument.variable) if decides else "",
    )


def _check(option: Option) -> Check:
    """Return the check of an argument: its own, or the one for its type, words and bounds."""
    argument = option.row.argument
    assert argument is not None
    if argument.check is not None:
        return argument.check
    check: Check = argument_checks.check_text
    if option.choices is not None:
        check = argument_checks.check_words(option.choices, any_case=argument.any_case)
    elif option.kind is bool:
        check = argument_checks.check_truth
    elif option.kind is int:
        bounds = option.row.bounds
        check = argument_checks.check_integer(bounds.get("ge", -math.inf), bounds.get("le", math.inf))
    return argument_checks.check_optional(check) if option.optional else check
