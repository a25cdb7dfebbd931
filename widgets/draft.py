"""A config while somebody edits it: right or wrong, option by option, without a widget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from notebook_accel.config.option import Option, as_text, read_number
from notebook_accel.config.schema import LaunchConfig, flat_values, has_effect, section_title, table
from notebook_accel.errors import ConfigError


class Draft:
    """The values of all options, right or wrong, and the last value of each that was right.

    Args:
        config: what to start from.

    Attributes:
        sentences: what is wrong, by the name of the option; the name "" has what is about no single option.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.replace(config)

    def replace(self, config: LaunchConfig) -> None:
        """Take all values from a config."""
        self._values = flat_values(config)
        self._right = dict(self._values)
        self._config: LaunchConfig | ConfigError = config
        self.sentences: dict[str, str] = {}

    @property
    def config(self) -> LaunchConfig:
        """The config; ConfigError lists what is wrong with it."""
        if isinstance(self._config, ConfigError):
            raise ConfigError(self._config.problems)
        return self._config

    def value(self, name: str) -> Any:
        """Return the value of an option, right or wrong."""
        return self._values[name]

    def change(self, name: str, value: Any) -> None:
        """Change the value of an option, and check all options."""
        self._values[name] = value
        try:
            self._config = LaunchConfig.model_validate(_nest(self._values))
        except ConfigError as error:
            self._config = error
            self.sentences = _by_option(error)
            self._right = self._without_wrong_ones()
        else:
            self._values = flat_values(self._config)
            self._right = dict(self._values)
            self.sentences = {}

    def _without_wrong_ones(self) -> dict[str, Any]:
        """Return all values, with the last right value in place of each wrong one."""
        kept = {name: value for name, value in self._values.items() if name not in self.sentences}
        try:
            return flat_values(LaunchConfig.model_validate(_nest({**self._right, **kept})))
        except ConfigError:  # the last right values contradict the others
            return self._right

    def visible_options(self, *, expert: bool) -> list[Option]:
        """Return the options that have an effect beside the choices so far, and those with a wrong value.

        Args:
            expert: include the expert options.
        """
        return [
            option
            for option in table()
            if option.name in self.sentences
            or (has_effect(option, self._right) and (expert or not option.face.expert))
        ]


def read_text(option: Option, text: str) -> Any:
    """Return the value that a typed text means, as in a config file; an empty text means the default.

    Args:
        option: that the text is for.
        text: a list has an item on each line, variables a line `name=value` each.
    """
    if not text.strip():
        return option.default
    text = text if option.row.spaces else text.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if option.kind is tuple:
        return tuple(lines)
    if option.kind is dict:
        pairs = [line.partition("=") for line in lines]
        return (
            {name.strip(): value for name, _, value in pairs} if all(mark for _, mark, _ in pairs) else text
        )
    return read_number(option, text)


def write_text(value: Any) -> str:
    """Return the text from which `read_text` reads a value."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "\n".join(map(as_text, value))
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={inner}" for name, inner in value.items())
    return as_text(value)


def group_by_section(options: Iterable[Option]) -> dict[str, list[Option]]:
    """Return the options by the titles of their sections; those of no section come first, as "Launch"."""
    groups: dict[str, list[Option]] = {"Launch": []}
    for option in options:
        groups.setdefault(section_title(option) or "Launch", []).append(option)
    return groups


def as_table(draft: Draft) -> str:
    """Return the options that have an effect as lines of text, with a sentence below each wrong value."""
    shown = draft.visible_options(expert=False)
    names = max(len(option.path[-1]) for option in shown)
    texts = {option.name: write_text(draft.value(option.name)).replace("\n", ", ") or "-" for option in shown}
    width = max(map(len, texts.values()))
    lines: list[str] = []
    for title, options in group_by_section(shown).items():
        lines += [title, "-" * len(title)]
        for option in options:
            lines.append(f"{option.path[-1]:{names}}  {texts[option.name]:{width}}  {option.help}")
            if option.name in draft.sentences:
                lines.append(f"{'':{names}}  ^ {draft.sentences[option.name]}")
        lines.append("")
    lines += [draft.sentences[""]] if "" in draft.sentences else []
    return "\n".join(lines).rstrip()


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in table():
        place = values
        for name in option.path[:-1]:
            place = place.setdefault(name, {})
        place[option.path[-1]] = flat[option.name]
    return values


def _by_option(error: ConfigError) -> dict[str, str]:
    """Return the sentences by option; a sentence about several options belongs to the option it begins with."""
    names = {option.name for option in table()}
    found: dict[str, list[str]] = {}
    for problem in error.problems:
        first = problem.text.partition(" ")[0]
        name = problem.name or (first if first in names else "")
        found.setdefault(name if name in names else "", []).append(problem.text)
    return {name: "\n".join(texts) for name, texts in found.items()}
