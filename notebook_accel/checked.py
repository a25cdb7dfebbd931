"""Checked: a base of dataclasses whose fields are checked where they are set, as the constructor checks them."""

from __future__ import annotations

import contextlib
from abc import ABCMeta
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar


class CheckedType(ABCMeta):
    """Constructs without checks of single fields: they begin when the instance is complete."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        make: Any = cls.__new__
        made = make(cls, *args, **kwargs)
        if isinstance(made, cls):
            with _set_freely(made):
                made.__init__(*args, **kwargs)
                # a `__post_init__` of the user need not call that of its base
                if made._is_incomplete and cls.__post_init__ is not Checked.__post_init__:
                    made._complete_fields()
        return made


class Checked(metaclass=CheckedType):
    """Base of a dataclass; its `_complete_fields` checks fields and completes them, also those that are complete.

    A field that is set later is checked together with the others. Where the check fails, all keep their values. The
    `__post_init__` of a class that a user derives runs once, in the constructor.

    Attributes:
        _is_closed: whether nothing but fields can be set.
    """

    _is_closed: ClassVar[bool] = False
    __slots__ = ("__dict__", "__weakref__", "_is_incomplete")  # no entry of vars()

    def __post_init__(self) -> None:
        self._complete_fields()
        if hasattr(self, "_is_incomplete"):
            object.__setattr__(self, "_is_incomplete", False)

    def _complete_fields(self) -> None:
        """Check nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_is_incomplete"):
            super().__setattr__(name, value)
            return
        names = [item.name for item in fields(self) if item.init]  # type: ignore[arg-type]
        if self._is_closed and name not in names:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}, its fields are {', '.join(names)}"
            )
        values = self._check(name, value) if name in names and hasattr(self, name) else {name: value}
        for other, completed in values.items():
            super().__setattr__(other, completed)

    def _check(self, name: str, value: Any) -> dict[str, Any]:
        """Return all fields with a new value of one, checked and completed."""
        trial = object.__new__(type(self))
        with _set_freely(trial):
            for other, current in _list_values(self).items():
                setattr(trial, other, current)
            setattr(trial, name, value)
            trial._prepare_check(name, getattr(self, name))
            trial._complete_fields()
            return _list_values(trial)

    def _prepare_check(self, name: str, before: Any) -> None:
        """Change, in a copy that is checked next, what followed from the earlier value of a field.

        Args:
            name: of the field.
            before: that value.
        """


@contextlib.contextmanager
def _set_freely(options: Checked) -> Iterator[None]:
    """Let fields be set without a check in this block."""
    object.__setattr__(options, "_is_incomplete", True)
    try:
        yield
    finally:
        object.__delattr__(options, "_is_incomplete")  # copies and pickles know nothing of it


def _list_values(options: Checked) -> dict[str, Any]:
    """Return attributes by name, also those that a dataclass keeps in slots."""
    named = [item.name for item in fields(options) if hasattr(options, item.name)]  # type: ignore[arg-type]
    return {**vars(options), **{name: getattr(options, name) for name in named}}
