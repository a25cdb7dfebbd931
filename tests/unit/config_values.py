"""Legal values of launch options, for tests: of one option by itself, and of whole configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from notebook_accel.config.option import Option
from notebook_accel.config.schema import LaunchConfig, table

OPTIONS = {option.name: option for option in table()}
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12).filter(
    lambda text: "," not in text
)
"""Texts without spaces and commas, which lists are split at."""
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=12)
    .map(str.strip)
    .filter(bool),
    st.sampled_from(
        [
            "no",
            "null",
            "~",
            "1",
            "1e3",
            "0x1f",
            "true",
            "a: b",
            "# a",
            "-",
            "- a",
            "'",
            '"',
            "a,b",
            "%a",
            "[",
            "{}",
        ]
    ),
)
_LARGEST = 60000
_PATTERNED = {
    "gpu_ids": st.sampled_from(["all", "0", "0,1", "3, 4"]),
    "rdzv_conf": st.sampled_from(["", "join_timeout=3", "a=1,b=x"]),
    "output": st.sampled_from(["all", "first", "none", "0", "0,2"]),
    "rdzv_endpoint": st.sampled_from(["", "localhost:29400", "10.0.0.1:1"]),
    "log_line_prefix_template": st.sampled_from(["[${rank}] ", "$$", "${role_name}${local_rank}:"]),
    "main_training_function": st.sampled_from(["main", "train", "_f1"]),
}
_AUTO = {"deepspeed_config.gradient_accumulation_steps": 1, "deepspeed_config.gradient_clipping": 0}
"""Numbers in place of which `auto` can stand, each with the smallest."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of their options as a config has them."""
    values: dict[str, Any] = {}
    for name, value in flat.items():
        place = values
        *sections, last = name.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return values


def legal(option: Option) -> st.SearchStrategy[Any]:
    """Return legal values of an option, its bounds among them; None too where it is one."""
    found = _values(option)
    if option.name in _AUTO:
        found = found | st.just("auto")
    return found | st.none() if option.optional and option.default is None else found


def _values(option: Option) -> st.SearchStrategy[Any]:
    if option.choices is not None:
        return st.sampled_from(option.choices)
    if option.kind is bool:
        return st.booleans()
    if option.kind is int:
        low, high, _ = _bounds(option)
        return st.integers(-_LARGEST if low is None else low, _LARGEST if high is None else high)
    if option.kind is float:
        low, high, above = _bounds(option)
        return st.floats(low, high or 1e9, exclude_min=above, allow_nan=False, allow_infinity=False)
    if option.kind is dict:
        return st.dictionaries(st.from_regex(r"X_[A-Z_]{1,8}", fullmatch=True), WORDS, max_size=2)
    if option.kind is tuple:
        if option.name.endswith("precision"):
            return st.tuples(*[st.booleans()] * 3)
        return st.lists(WORDS, max_size=2).map(tuple)
    return _PATTERNED.get(option.name, TEXTS)


def _bounds(option: Option) -> tuple[Any, Any, bool]:
    """Return the smallest and the largest value, and whether the smallest is none itself."""
    low: Any = _AUTO.get(option.name)
    bounds = option.row.bounds
    low = bounds.get("ge", bounds.get("gt", low))
    return low, bounds.get("le"), "gt" in bounds


def configs() -> st.SearchStrategy[LaunchConfig]:
    """Return whole configs, with many options at once."""
    fixed = ("machine_rank", "min_machines", "num_machines")  # which have to go with others
    free = {name: legal(option) for name, option in OPTIONS.items() if name not in fixed}
    return st.fixed_dictionaries({}, optional=free).map(
        lambda flat: LaunchConfig.model_validate(nested(flat))
    )


def beside(option: Option, value: Any) -> dict[str, Any]:
    """Return values of others, by name, with which a value is legal and has a meaning."""
    found: dict[str, Any] = {"num_machines": value + 1} if option.name == "machine_rank" else {}
    if option.name == "min_machines" and value is not None:
        found = {"num_machines": value}
    for name, rules in option.face.when.items():
        other = OPTIONS[name]
        rule = rules[0]
        if isinstance(rule, str) and rule.startswith("!"):
            rule = next((choice for choice in other.choices or () if choice != rule[1:]), "other")
        elif isinstance(rule, str) and rule.startswith(">"):
            rule = max(int(rule[1:]) + 1, found.get(name, 0))
        found = {**beside(other, rule), **found, name: rule}
    return found
