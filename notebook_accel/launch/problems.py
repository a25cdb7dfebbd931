"""What is wrong with the arguments of a launch, all of it at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Final

_DAY: Final = 86_400


class Problems:
    """Collects what is wrong with the arguments."""

    def __init__(self) -> None:
        self._values: list[str] = []
        self._types: list[str] = []

    def value(self, text: str) -> None:
        """Note an illegal value."""
        self._values.append(text)

    def type(self, text: str) -> None:
        """Note a value of a wrong type."""
        self._types.append(text)

    def one_of(self, name: str, value: object, legal: Sequence[str]) -> None:
        """Note a word that is not among the legal ones."""
        if not isinstance(value, str) or value not in legal:
            self.value(f"{name}={value!r}: choose among {', '.join(map(repr, legal))}")

    def integer(self, name: str, value: object, least: int, most: float = math.inf) -> bool:
        """Note what is no integer within the bounds; return whether it is one."""
        if isinstance(value, bool) or not isinstance(value, Integral):
            self.type(f"{name}={value!r}: an integer is needed, not {type(value).__name__}")
            return False
        if not least <= int(value) <= most:
            bound = f"at least {least}" if value < least else f"at most {most:.0f}"
            self.value(f"{name}={value}: {bound} is needed")
            return False
        return True

    def raise_any(self, function: str) -> None:
        """Raise TypeError where all problems are wrong types, ValueError with all of them otherwise."""
        __tracebackhide__ = True
        texts = self._types + self._values
        if not texts:
            return
        if len(texts) == 1:
            message = f"{function}: {texts[0]}"
        else:
            message = f"{function}: {len(texts)} problems\n" + "\n".join(f"  - {text}" for text in texts)
        raise ValueError(message) if self._values else TypeError(message)


def is_seconds(value: Any) -> bool:
    """Whether it is a number of seconds, more than 0 and a day at most."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= _DAY
