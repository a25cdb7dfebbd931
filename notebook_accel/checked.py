"""Checked: a base of dataclasses whose fields are checked where they are set, as the constructor checks them."""

from __future__ import annotations

import contextlib
import sys
from abc import ABCMeta
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

_FLAGS: Final = ("bool", "bool | None")
"""Types of fields; annotations of the package are not evaluated."""
_PACKAGE: Final = __name__.partition(".")[0] + "."


class CheckedType(ABCMeta):
    """Constructs without checks of single fields: they begin when the instance is complete."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        make: Any = cls.__new__
        made = make(cls, *args, **kwargs)
        if isinstance(made, cls):
            with _set_freely(made) as making:
                made.__init__(*args, **kwargs)
                # a `__post_init__` of the user need not call that of its base
                if not making.is_checked and cls.__post_init__ is not Checked.__post_init__:
                    made._complete()
        return made


class Checked(metaclass=CheckedType):
    """Base of a dataclass; its `_complete_fields` checks fields and completes them, also those that are complete.

    A field that is set later is checked together with the others. Where the check fails, all keep their values. The
    `__post_init__` of a class that a user derives runs once, in the constructor; what it sets after that of its base
    counts as set later. An instance that no constructor made, as code makes that copies field by field, is checked when
    all its fields are there.

    Attributes:
        _is_closed: whether nothing but fields can be set; a class that derives is open.
    """

    _is_closed: ClassVar[bool] = False
    __slots__ = ("__dict__", "__weakref__", "_making")  # no entry of vars()

    def __post_init__(self) -> None:
        making: _Making = getattr(self, "_making", _Making())
        making.is_checked = False
        self._complete()
        making.is_checked = True

    def _complete(self) -> None:
        """Check and complete all fields; after that, flags of the package's own class have to be true or false."""
        self._complete_fields()
        own = next((kind for kind in type(self).__mro__ if kind.__module__.startswith(_PACKAGE)), Checked)
        flags = [item.name for item in fields(own) if item.type in _FLAGS] if own is not Checked else []
        for name in flags:
            if not is_flag(value := getattr(self, name)):
                raise TypeError(f"{name}={value!r}: True or False is needed")

    def _complete_fields(self) -> None:
        """Check nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        names = [item.name for item in fields(self) if item.init]  # type: ignore[arg-type]
        making: _Making | None = getattr(self, "_making", None)
        sets_freely = making is not None and (not making.is_checked or name not in names)
        if sets_freely or (name in names and self._lacks(names, name)):
            super().__setattr__(name, value)
            return
        if name not in names:
            if vars(type(self)).get("_is_closed"):
                raise AttributeError(
                    f"{type(self).__name__} has no field {name!r}, its fields are {', '.join(names)}"
                )
            super().__setattr__(name, value)
            return
        for other, completed in self._check(name, value).items():
            super().__setattr__(other, completed)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(max(protocol, 2))  # the others know no slots
        if (
            isinstance(made, tuple)
            and len(made) > 2
            and isinstance(made[2], tuple)
            and hasattr(self, "_making")
        ):
            plain, slots = made[2]
            left = {name: value for name, value in slots.items() if name != "_making"}
            made = (*made[:2], (plain, left), *made[3:])
        return made

    def _lacks(self, names: Collection[str], but: str) -> bool:
        """Return whether a field other than one was never set."""
        return bool(set(names) - {but} - _list_values(self).keys())

    def _check(self, name: str, value: Any) -> dict[str, Any]:
        """Return all fields with a new value of one, checked and completed."""
        values = _list_values(self)
        trial = object.__new__(type(self))
        with _set_freely(trial) as making:
            for other, current in values.items():
                setattr(trial, other, current)
            setattr(trial, name, value)
            making.filled = set()
            if name in values and value is not values[name]:
                trial._prepare_check(name, values[name])
                now = _list_values(trial)
                making.filled = {
                    name,
                    *(other for other in values if now[other] is None and values[other] is not None),
                }
            trial._complete()
            return _list_values(trial)

    def _prepare_check(self, name: str, before: Any) -> None:
        """Change, in a copy that is checked next, what followed from the earlier value of a field.

        Args:
            name: of the field, which has another value now.
            before: the earlier one.
        """

    def _fills(self, *names: str) -> bool:
        """Return whether a None is to be replaced by a default: in the constructor, and where it was set just now.

        Args:
            names: fields, of which one is enough.
        """
        filled = self._making.filled if hasattr(self, "_making") else None
        return filled is None or not filled.isdisjoint(names)


@dataclass(slots=True)
class _Making:
    """What is known of an instance while its fields are set without checks.

    Attributes:
        filled: the fields whose None is replaced by a default, None for all.
        is_checked: whether they were checked.
    """

    filled: set[str] | None = None
    is_checked: bool = False


@contextlib.contextmanager
def _set_freely(options: Checked) -> Iterator[_Making]:
    """Let fields be set without a check in this block."""
    making = _Making()
    object.__setattr__(options, "_making", making)
    try:
        yield making
    finally:
        object.__delattr__(options, "_making")


def is_flag(value: Any) -> bool:
    """Return whether a value is a truth value; None, 0, 1 and NumPy's are, as argparse, YAML and tables give them.

    Args:
        value: any.
    """
    numpy = sys.modules.get("numpy")
    of_numpy = numpy is not None and isinstance(value, numpy.bool_)
    return value is None or of_numpy or (isinstance(value, int) and value in (0, 1))


def _list_values(options: Checked) -> dict[str, Any]:
    """Return attributes by name, also those that slots or properties hold; not the defaults, which the class holds."""
    names = [item.name for item in fields(options)]  # type: ignore[arg-type]
    for kind in type(options).__mro__:
        names += () if kind is Checked else vars(kind).get("__slots__", ())
    held = [name for name in names if hasattr(type(getattr(type(options), name, None)), "__set__")]
    return {**vars(options), **{name: getattr(options, name) for name in held if hasattr(options, name)}}
