"""What single arguments of a launch may be, in sentences; pydantic is not needed."""

from __future__ import annotations

import math
import os
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, TypeAlias

_DAY: Final = 86_400
_PREFIX_FIELDS: Final = {"rank": 0, "local_rank": 0, "role_name": ""}
_OF_ARGUMENTS: Final = frozenset({"backend", "endpoint", "run_id", "min_nodes", "max_nodes", "rank"})
_DURATIONS: Final = ("timeout", "join_timeout", "last_call_timeout")
OUTPUTS: Final = ("all", "first", "none")
SET_BY_LAUNCHES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"), ""),
    **dict.fromkeys(("FORK_LAUNCHED", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"), ""),
    "WORLD_SIZE": "num_processes",
    "GROUP_RANK": "node_rank",
    "GROUP_WORLD_SIZE": "num_nodes",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "use_port",
    "TORCHELASTIC_MAX_RESTARTS": "max_restarts",
    "TORCHELASTIC_RUN_ID": "rdzv_id",
}
"""Variables that each rank has from its launch, and the argument that decides what is in them."""


Check: TypeAlias = Callable[[str, Any], Iterator[Exception]]
"""Yields what is wrong with the argument of a name: a ValueError or a TypeError each, which is not raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentCheck:
    """How an argument is checked by itself.

    Attributes:
        default: what is right without a look.
        check: yields what is wrong with any other value.
        variable: the environment variable that decides where the argument has its default; empty for none.
    """

    default: Any
    check: Check
    variable: str = ""


def find_problems(
    checks: Mapping[str, ArgumentCheck], values: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, list[Exception]]:
    """Return what is wrong with each argument of a launch by itself: its type, word, bounds or form.

    Args:
        checks: of the arguments, by name.
        values: arguments by name, in the order of the problems. An argument without a check is skipped.
        variables: environment variables of this process.

    Returns:
        ValueErrors and TypeErrors by the name of the argument; only wrong arguments are in it. The value of a variable
        that decides in place of an argument counts as the argument's.
    """
    problems: dict[str, list[Exception]] = {}
    for name, value in values.items():
        known = checks.get(name)
        if known is None:
            continue
        if type(value) is not type(known.default) or value != known.default:
            found = list(known.check(name, value))
        elif known.variable in variables:
            found = list(known.check(f"environment variable {known.variable}", variables[known.variable]))
        else:
            continue
        if found:
            problems[name] = found
    return problems


def check_optional(check: Check) -> Check:
    """Return the check for what may also be None."""
    return lambda name, value: iter(()) if value is None else check(name, value)


def check_words(legal: Sequence[object], *, any_case: bool = False) -> Check:
    """Return the check for a word that is one of these."""

    def check(name: str, value: Any) -> Iterator[Exception]:
        word = value.lower() if any_case and isinstance(value, str) else value
        if not isinstance(word, str) or word not in legal:
            yield ValueError(f"{name}={word!r}: choose among {', '.join(map(repr, legal))}")

    return check


def check_integer(least: float, most: float = math.inf) -> Check:
    """Return the check for an integer from `least` to `most`."""

    def check(name: str, value: Any) -> Iterator[Exception]:
        if isinstance(value, bool) or not isinstance(value, Integral):
            text = f"{name}={value!r}: an integer is needed, not {type(value).__name__}"
            yield TypeError(text)
        elif not least <= int(value) <= most:
            bound = f"at least {least:.0f}" if value < least else f"at most {most:.0f}"
            yield ValueError(f"{name}={value}: {bound} is needed")

    return check


def check_truth(name: str, value: Any) -> Iterator[Exception]:
    """Check a truth value."""
    if not isinstance(value, bool):
        yield TypeError(f"{name}={value!r}: True or False is needed")


def check_text(name: str, value: Any) -> Iterator[Exception]:
    """Check a text, which a line of a log or of an error can show."""
    if not isinstance(value, str):
        yield TypeError(f"{name}={value!r}: a string is needed")
    elif "\0" in value or not value.isprintable():
        yield ValueError(f"{name}={value!r}: printable characters are needed")


def check_name(name: str, value: Any) -> Iterator[Exception]:
    """Check the name of a run; one of digits alone would be a number."""
    yield from check_text(name, value)
    if isinstance(value, str) and (value != value.strip() or value.isdecimal() or not 0 < len(value) <= 100):
        yield ValueError(
            f"{name}={value!r}: 1 to 100 characters are needed, not digits alone, no space at the ends"
        )


def check_host(name: str, value: Any) -> Iterator[Exception]:
    """Check the name of a host."""
    if value == "":
        yield ValueError(f"{name}='': a host name or address is needed")
    yield from check_text(name, value)


def check_secret(name: str, value: Any) -> Iterator[Exception]:
    """Check a secret, which no message shows; whoever reads it checks the rest."""
    if value is not None and not isinstance(value, (str, os.PathLike)):
        text = f"{name} is of type {type(value).__name__}: a string is needed, or the Path of a file"
        yield TypeError(text)


def check_nothing(name: str, value: Any) -> Iterator[Exception]:
    """Check nothing, of an argument that something else checks."""
    return iter(())


def check_seconds(name: str, value: Any) -> Iterator[Exception]:
    """Check a number of seconds, a day at most."""
    if not isinstance(value, Real) or isinstance(value, bool):
        yield TypeError(f"{name}={value!r}: seconds are needed")
    elif not is_seconds(value):
        yield ValueError(f"{name}={value}: more than 0 seconds are needed, a day at most")


def check_duration(name: str, value: Any) -> Iterator[Exception]:
    """Check a number of seconds that may be 0."""
    if not isinstance(value, Real) or isinstance(value, bool):
        yield from check_seconds(name, value)
    elif value != 0 and not is_seconds(value):
        yield ValueError(f"{name}={value}: 0 seconds or more are needed, a day at most")


def check_patience(name: str, value: Any) -> Iterator[Exception]:
    """Check a number of seconds that may be None, which is for ever."""
    if value is not None and not is_seconds(value):
        text = f"{name}={value!r}: seconds are needed, a day at most, or None for never"
        yield ValueError(text)


def check_output(name: str, value: Any) -> Iterator[Exception]:
    """Check the ranks whose output is shown: a word or a collection of ranks."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        yield from check_words(OUTPUTS)(name, value)
    elif not all(
        isinstance(rank, Integral) and not isinstance(rank, bool) and int(rank) >= 0 for rank in value
    ):
        yield ValueError(f"{name}={value!r}: a collection of ranks is needed, each 0 or more")


def check_template(name: str, value: Any) -> Iterator[Exception]:
    """Check what is written before each line."""
    if value is None:
        return
    if not isinstance(value, str):
        yield TypeError(f"{name}={value!r}: a string is needed")
    elif reason := find_template_error(value):
        yield ValueError(f"{name}={value!r} {reason}")


def find_template_error(template: str) -> str:
    """Return why a line prefix cannot be filled in; empty where it can."""
    try:
        string.Template(template).substitute(_PREFIX_FIELDS)
    except (KeyError, ValueError) as error:
        return f"({error}): it may name ${{rank}}, ${{local_rank}} and ${{role_name}}"
    return ""


def check_folder(name: str, value: Any) -> Iterator[Exception]:
    """Check the path of a folder that is there, or that can be made."""
    if value is None:
        return
    if not isinstance(value, (str, os.PathLike)):
        yield TypeError(f"{name}={value!r}: the path of a folder is needed")
        return
    if not str(value) or "\0" in str(value):
        yield ValueError(f"{name}={value!r}: the path of a folder is needed")
        return
    path = Path(value).expanduser()
    try:
        there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), path)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        yield ValueError(f"{name}={str(value)!r}: {error.strerror}")
        return
    if not there.is_dir():
        text = f"{name}={str(value)!r}: {there} is a file, the path of a folder is needed"
        yield ValueError(text)
    elif not os.access(there, os.W_OK):
        yield ValueError(f"{name}={str(value)!r}: {there} cannot be written to")


def check_environment(name: str, value: Any) -> Iterator[Exception]:
    """Check variables of processes."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(text, str) for pair in value.items() for text in pair
    ):
        text = f"{name}={value!r}: a dict is needed, its names and values are strings"
        yield TypeError(text)
        return
    for variable, text in value.items():
        if not variable or "=" in variable or "\0" in variable + text:
            yield ValueError(f"{name}={{{variable!r}: {text!r}}}: no system takes such a variable")
        elif variable in SET_BY_LAUNCHES:
            yield ValueError(f"{name}={{{variable!r}: {text!r}}}: {explain_set_by_launches(variable)}")


def explain_set_by_launches(variable: str) -> str:
    """Return why a variable of `SET_BY_LAUNCHES` cannot be chosen, and what can be."""
    argument = SET_BY_LAUNCHES[variable]
    return "a launch sets this variable for each rank" + (
        f"; give {argument}= in its place" if argument else ""
    )


def check_num_nodes(name: str, value: Any) -> Iterator[Exception]:
    """Check a number of nodes, or a range of it such as `1:4`."""
    if isinstance(value, str):
        if reason := find_range_error(value):
            yield ValueError(f"{name}={value!r}: {reason}")
    else:
        yield from check_integer(1)(name, value)


def find_range_error(text: str) -> str:
    """Return why a text is no range of nodes such as `1:4`; empty where it is one."""
    least, colon, most = (part.strip() for part in text.partition(":"))
    if not colon or not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in (least, most)):
        return "an integer is needed, or 'min:max' such as '1:4'"
    if int(least) < 1:
        return "at least 1 node is needed"
    if int(least) > int(most):
        return f"the first number is the smaller one, {most}:{least} perhaps"
    return ""


def check_port(name: str, value: Any) -> Iterator[Exception]:
    """Check a port; None or 0 is a free one."""
    if parse_port(value) is None:
        text = f"{name}={value!r}: a port from 0 to 65535 is needed, or None for a free one"
        yield ValueError(text)


def parse_port(value: Any) -> int | None:
    """Return the port that a number or a text names, 0 for None and for any free one, None where it names none."""
    if value is None:
        return 0
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value) if 0 <= int(value) <= 65535 else None


def parse_engine(value: Any) -> Any:
    """Return an engine as the user gave it; `elastic` is the old name of `local`."""
    return "local" if value == "elastic" else value


def parse_start_method(value: Any) -> Any:
    """Return a start method as the user gave it; multiprocessing's names of fresh processes mean `fresh`."""
    return "fresh" if value in ("forkserver", "spawn") else value


def replace_old_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a launch with today's words for what the user gave."""
    engine, start_method = parse_engine(options["engine"]), parse_start_method(options["start_method"])
    return {**options, "engine": engine, "start_method": start_method}


def check_rendezvous(name: str, value: Any) -> Iterator[Exception]:
    """Check the settings of a rendezvous."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        yield TypeError(f"{name}={value!r}: a dict is needed, its keys are names")
        return
    for key in sorted(_OF_ARGUMENTS & value.keys()):
        yield ValueError(f"{name}={value!r}: {key} is set by an argument of the launch")
    for key in _DURATIONS:
        if key in value and not is_seconds(value[key]):
            yield ValueError(f"{name}={value!r}: {key} is a number of seconds, more than 0")


def is_seconds(value: Any) -> bool:
    """Return whether it is a number of seconds, more than 0 and a day at most."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= _DAY
