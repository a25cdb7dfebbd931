"""A config while somebody edits it: right or wrong, option by option, without a widget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from notebook_accel.config import problems
from notebook_accel.config.file import flat_values
from notebook_accel.config.option import Option, as_text, read_number
from notebook_accel.config.schema import LaunchConfig, matters, section_title, table
from notebook_accel.errors import ConfigError


class Draft:
    """Values of all options, the last ones that were right among them.

    Attributes:
        sentences: what is wrong, by the name of the option it is about; by "" where it is about none.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.replace(config)

    def replace(self, config: LaunchConfig) -> None:
        """Start anew from a config."""
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
        """Return the value of an option, which may be a wrong one."""
        return self._values[name]

    def change(self, name: str, value: Any) -> None:
        """Give an option a value and check all of them."""
        self._values[name] = value
        try:
            self._config = problems.check(_nested(self._values))
        except ConfigError as error:
            self._config = error
            self.sentences = _by_option(error)
            self._right = self._without_wrong_ones()
        else:
            self._values = flat_values(self._config)
            self._right = dict(self._values)
            self.sentences = {}

    def _without_wrong_ones(self) -> dict[str, Any]:
        """Return all values, with the last right ones in place of those with a sentence."""
        kept = {name: value for name, value in self._values.items() if name not in self.sentences}
        try:
            return flat_values(problems.check(_nested({**self._right, **kept})))
        except ConfigError:  # the last right ones do not go with the others
            return self._right

    def shown(self, *, expert: bool) -> list[Option]:
        """Return the options that have a meaning beside the choices so far, and all that are wrong."""
        return [
            option
            for option in table()
            if option.name in self.sentences
            or (matters(option, self._right) and (expert or not option.face.expert))
        ]


def read_text(option: Option, text: str) -> Any:
    """Return the value that a typed text means, as a config file would be read; without a text the default.

    Lists have an item on each line, variables a line `name=value` each.
    """
    text = text.strip()
    if not text:
        return option.default
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
    """Return the text that means a value."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "\n".join(map(as_text, value))
    if isinstance(value, Mapping):
        return "\n".join(f"{name}={inner}" for name, inner in value.items())
    return as_text(value)


def in_sections(options: Iterable[Option]) -> dict[str, list[Option]]:
    """Return the options by what their section says of itself; those of no section come first."""
    found: dict[str, list[Option]] = {"Launch": []}
    for option in options:
        found.setdefault(section_title(option) or "Launch", []).append(option)
    return found


def as_table(draft: Draft) -> str:
    """Return the options that have a meaning as lines of text, with a sentence below each wrong one."""
    shown = draft.shown(expert=False)
    names = max(len(option.path[-1]) for option in shown)
    texts = {option.name: write_text(draft.value(option.name)).replace("\n", ", ") or "-" for option in shown}
    width = max(map(len, texts.values()))
    lines: list[str] = []
    for title, options in in_sections(shown).items():
        lines += [title, "-" * len(title)]
        for option in options:
            lines.append(f"{option.path[-1]:{names}}  {texts[option.name]:{width}}  {option.help}")
            if option.name in draft.sentences:
                lines.append(f"{'':{names}}  ^ {draft.sentences[option.name]}")
        lines.append("")
    lines += [draft.sentences[""]] if "" in draft.sentences else []
    return "\n".join(lines).rstrip()


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in table():
        place = values
        for name in option.path[:-1]:
            place = place.setdefault(name, {})
        place[option.path[-1]] = flat[option.name]
    return values


def _by_option(error: ConfigError) -> dict[str, str]:
    """Return the sentences by option; one about several options belongs to the one it begins with."""
    names = {option.name for option in table()}
    found: dict[str, list[str]] = {}
    for problem in error.problems:
        first = problem.text.partition(" ")[0]
        name = problem.name or (first if first in names else "")
        found.setdefault(name if name in names else "", []).append(problem.text)
    return {name: "\n".join(texts) for name, texts in found.items()}
