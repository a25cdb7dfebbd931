"""Checked: a base of dataclasses whose fields are checked where they are set, as the constructor checks them."""

from __future__ import annotations

from abc import ABCMeta
from dataclasses import fields
from typing import Any


class CheckedType(ABCMeta):
    """Constructs without checks of single fields: until it is complete, an instance is of a subclass without them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made: Any = object.__new__(cls._find_unchecked())
        made.__init__(*args, **kwargs)
        made.__class__ = cls
        return made

    def _find_unchecked(cls) -> Any:
        if "_own_unchecked" not in vars(cls):
            methods = {"__setattr__": object.__setattr__, "__doc__": cls.__doc__}
            cls._own_unchecked: Any = type(cls)(cls.__name__, (cls,), methods)
        return cls._own_unchecked


class Checked(metaclass=CheckedType):
    """Base of a dataclass; its `__post_init__` checks fields and completes them, also those that are complete.

    A field that is set later is checked together with the others. Where the check fails, all keep their values.
    """

    def __post_init__(self) -> None:
        """Check nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        if any(item.name == name and item.init for item in fields(self)):  # type: ignore[arg-type]
            vars(self).update(self._check(name, value))
        else:
            super().__setattr__(name, value)

    def _check(self, name: str, value: Any) -> dict[str, Any]:
        """Return all fields with a new value of one, checked and completed."""
        trial = object.__new__(type(self)._find_unchecked())
        vars(trial).update({**vars(self), name: value})
        trial._prepare_check(name)
        trial.__post_init__()
        completed: dict[str, Any] = vars(trial)
        return completed

    def _prepare_check(self, name: str) -> None:
        """Change, in a copy that is checked next, what followed from the earlier value of a field."""
