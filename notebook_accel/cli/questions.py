"""A config by questions in a terminal, made from the schema: an option's help text is its question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import questionary

from ..config import basic
from ..config.option import Option, as_text, read_number
from ..config.schema import LaunchConfig, flat_values, has_effect, table
from ..errors import ConfigError

_FIRST: Final = ("distributed_type", "use_cpu", "num_machines")  # on which other defaults depend
_NONE: Final = "none"
_UNSET: Final = "not set"
_ELSEWHERE: Final = "--- on other machines ---"


def confirm(question: str) -> bool:
    """Ask for yes or no, no being the default; KeyboardInterrupt and EOFError where the user left."""
    return bool(questionary.confirm(question, default=False).unsafe_ask())


class Questionnaire:
    """Asks for the options that have an effect beside the answers so far.

    Args:
        defaults: returns the config whose values are the defaults, for the answers so far.
        given: answers that need no question, as nested values.
        every: ask for the expert options too.

    Raises:
        ConfigError: a given answer is wrong.
    """

    def __init__(
        self,
        defaults: Callable[[Mapping[str, Any]], LaunchConfig],
        given: Mapping[str, Any],
        *,
        every: bool = False,
    ) -> None:
        LaunchConfig.model_validate(given)
        self._defaults = defaults
        self._answers: dict[str, Any] = dict(given)
        self._every = every

    def ask(self) -> LaunchConfig:
        """Ask all questions and return the config of the answers.

        Raises:
            KeyboardInterrupt, EOFError: the user left.
        """
        for option in sorted(table(), key=lambda option: option.name not in _FIRST):
            if not _has(self._answers, option) and self._is_asked(option):
                default = flat_values(self._defaults(self._answers))[option.name]
                value = self._answer(option, default)
                for same in filter(self._is_asked, _same(option)):
                    self._answers = _with(self._answers, same, value)
        merged = self._defaults(self._answers).model_dump()
        for name, value in self._answers.items():
            merged[name] = {**merged[name], **value} if name in _sections() else value
        return LaunchConfig.model_validate(merged)

    def _is_asked(self, option: Option) -> bool:
        if option.face.expert and not self._every:
            return False
        values = flat_values(self._defaults(self._answers))
        answers = flat_values(LaunchConfig.model_validate(self._answers))
        values |= {known.name: answers[known.name] for known in table() if _has(self._answers, known)}
        return has_effect(option, values)

    def _answer(self, option: Option, default: Any) -> Any:
        message = f"{option.help} ({option.path[-1]})"
        labels = _labels(option, default)
        if labels:
            preset = next(label for label, value in labels.items() if value == default)
            question = questionary.select(message, self._list_offers(option, labels), default=preset)
            return labels[question.unsafe_ask()]

        def judge(text: str) -> bool | str:
            return self._problem(option, _value(option, text, default)) or True

        shown = _UNSET if default is None else as_text(default) or "empty"
        unset = f"; {_NONE} unsets it" if option.default is None and default is not None else ""
        asked = questionary.text(message, instruction=f"[{shown}{unset}] ", validate=judge)
        return _value(option, asked.unsafe_ask(), default)

    def _list_offers(self, option: Option, labels: Mapping[str, Any]) -> list[str | questionary.Separator]:
        """Return what can be selected; the distributed types that this machine can run come first."""
        if option.name != "distributed_type":
            return list(labels)
        first = basic.fitting_types(use_cpu=LaunchConfig.model_validate(self._answers).use_cpu)
        return [*first, questionary.Separator(_ELSEWHERE), *(label for label in labels if label not in first)]

    def _problem(self, option: Option, value: Any) -> str:
        """Return the sentence about an answer that is wrong beside the others, empty where it is right."""
        try:
            LaunchConfig.model_validate(_with(self._answers, option, value))
        except ConfigError as error:
            return str(error.problems[0])
        return ""


def _sections() -> set[str]:
    return {option.path[0] for option in table() if len(option.path) > 1}


def _same(option: Option) -> list[Option]:
    """Return the options that the flag of this one sets: one question asks for all of them."""
    shared = [
        known for known in table() if known.face.flag is not None and known.face.flag == option.face.flag
    ]
    return shared or [option]


def _has(answers: Mapping[str, Any], option: Option) -> bool:
    place: Any = answers
    for name in option.path:
        if name not in place:
            return False
        place = place[name]
    return True


def _with(answers: Mapping[str, Any], option: Option, value: Any) -> dict[str, Any]:
    """Return the answers and one more."""
    *sections, last = option.path
    if not sections:
        return {**answers, last: value}
    return {**answers, sections[0]: {**answers.get(sections[0], {}), last: value}}


def _labels(option: Option, default: Any) -> dict[str, Any]:
    """Return what can be selected, and the value of each; empty where the answer is typed."""
    choices = option.choices or ((True, False) if option.kind is bool else ())
    labels = {
        ("yes" if value else "no") if isinstance(value, bool) else str(value): value for value in choices
    }
    if choices and option.optional and (option.default is None or default is None):
        labels = {_UNSET: None, **labels}
    return labels


def _value(option: Option, text: str, default: Any) -> Any:
    """Return the value of an answer: an empty one is the default, `none` is None where an option need not be set."""
    if not text.strip():
        return default
    text = text if option.row.spaces else text.strip()
    if option.default is None and text.lower() == _NONE:
        return None
    if option.kind is tuple:
        return text.split(",")
    if option.kind is dict and all("=" in part for part in text.split(",")):
        return dict(part.split("=", 1) for part in text.split(","))
    return read_number(option, text)
