"""What the states show of the runtime, also as the dicts that Accelerate has, which libraries read, set and clear."""

from __future__ import annotations

from abc import ABCMeta
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final

from . import devices, runtime
from .choices import DistributedType
from .runtime import Runtime, Settings

SHARED: Final = (
    *("backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
    *("local_process_index", "fork_launched"),
)
"""What all instances of a `PartialState` show."""
CHOSEN: Final = (
    *("mixed_precision", "dynamo_plugin", "fsdp_plugin", "deepspeed_plugins", "parallelism_config"),
)
"""What an accelerator has chosen."""
SETTINGS: Final = tuple(item.name for item in fields(Settings))
_SAVED: Final = "_saved"
_MAX_KEPT: Final = 32


def list_values(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes of an object by their names."""
    return {name: getattr(owner, name) for name in names}


def find_distributed_type(own: Runtime) -> DistributedType:
    """Return the type of the strategy if it has one, else that of the devices; NO for one process."""
    if own.settings.distributed_type is not None:
        return DistributedType(own.settings.distributed_type)
    if own.device.type == "xla":
        return DistributedType.XLA
    if own.topology.world_size == 1:
        return DistributedType.NO
    return DistributedType(devices.kind_of(own.device.type).distributed_type)


@dataclass(repr=False, eq=False, slots=True)
class SavedState:
    """What a state was, to be brought back.

    Attributes:
        state: its class.
        shown: what it showed, by name; empty where there was none.
        own: the runtime that it was of, None where there was none.
        parts: the parts of this runtime that the state owns, as they were, by name.
    """

    state: StateType
    shown: dict[str, Any]
    own: Runtime | None
    parts: dict[str, Any]

    @classmethod
    def of(cls, state: StateType) -> SavedState:
        """Return what a state is now.

        Args:
            state: its class.
        """
        own = runtime.current()
        parts = {} if own is None else {name: _read(own, name) for name in state._parts}
        return cls(state, state._list_shared(), own, parts)

    def as_dict(self) -> dict[str, Any]:
        """Return what the state showed, and this; nothing where there was no state."""
        return {_SAVED: self, **self.shown} if self.shown else {}

    def forget(self) -> None:
        """Be a state that there was not."""
        self.shown, self.own, self.parts = {}, None, {}

    def restore(self) -> None:
        """Bring the state back."""
        if self.own is None:
            return self.state._reset_state()
        for name, value in self.parts.items():
            _write(self.own, name, value)
        if self.state._installs and runtime.current() is not self.own:
            runtime.install(self.own)

    def follow(self, older: SavedState) -> None:
        """Take over what was brought back now and is older than this: this was saved while that was away.

        Args:
            older: of any state.
        """
        if older.state._installs and self.own is not older.own:
            self.own, self.parts = older.own, {}
        if self.own is older.own:
            self.parts |= {name: older.parts[name] for name in self.parts.keys() & older.parts.keys()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SavedState) and self.own is other.own and self.parts == other.parts

    def __deepcopy__(self, memo: Any) -> SavedState:
        return self

    def __repr__(self) -> str:
        return f"SavedState({self.state.__name__})"


class SharedState(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc,metaclass]
    """What a state shows, by name; empty where there is none.

    What is set here counts at once. Where another dict was set in its place, this shows what the state was before.
    A copy is a plain dict. It brings the state back as it was, where it is set in place of this or put into it, because
    one of its values is a `SavedState`.

    Args:
        state: the class of the state.
        place: stands for the dict that the class has now.
    """

    __slots__ = ("_place", "_state")

    def __init__(self, state: StateType, place: object) -> None:
        super().__init__()
        self._state = state
        self._place = place

    def _find(self) -> SavedState | None:
        """Return what the state was while the class had this dict; None where it still has it."""
        return None if self._place is self._state._place else self._state._find_kept(self._place)

    def copy(self) -> dict[str, Any]:
        """Return a plain dict that brings the state back as it is now."""
        return (self._find() or SavedState.of(self._state)).as_dict()

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return self.copy()

    def __getitem__(self, name: str) -> Any:
        return self.copy()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __len__(self) -> int:
        return len(self.copy())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, values: Any) -> Any:
        return self.copy() | values

    def __ror__(self, values: Any) -> Any:
        return dict(values) | self.copy()

    def __setitem__(self, name: str, value: Any) -> None:
        if self._find() is not None:
            raise TypeError(f"{self._state.__name__} has another _shared_state: this one does not change")
        if name == _SAVED:
            value.restore()
        elif hasattr(self._state, name):
            setattr(self._state(), name, value)
        else:
            raise AttributeError(f"{name!r} is no part of {self._state.__name__}")

    def update(self, values: Any = (), /, **named: Any) -> None:
        """Set values of the state; a copy of an earlier one brings that back.

        Args:
            values: by name, or pairs.
            named: more of them.

        Raises:
            AttributeError: a value is no part of the state, or cannot be set; all stay as they were.
        """
        wanted, before = dict(values, **named), SavedState.of(self._state)
        try:
            if _SAVED in wanted:
                self[_SAVED] = wanted.pop(_SAVED)
            for name, value in wanted.items():
                if name not in self or self[name] != value:
                    self[name] = value
        except Exception:
            before.restore()
            raise

    def __ior__(self, values: Any) -> SharedState:
        self.update(values)
        return self

    def clear(self) -> None:
        """Remove the state."""
        kept = self._find()
        if kept is None:
            self._state._reset_state()
        else:
            kept.forget()

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        raise TypeError(f"{name!r} cannot be removed from a state: clear() removes the state")

    def popitem(self) -> tuple[str, Any]:
        """Raise TypeError: no value can be removed."""
        raise TypeError("no value can be removed from a state: clear() removes the state")


class SharedStateAttribute:
    """The class attribute `_shared_state` of a state."""

    def __get__(self, instance: Any, owner: StateType) -> SharedState:
        return SharedState(owner, owner._place)

    def __set__(self, instance: Any, values: Any) -> None:
        type(instance)._shared_state = values


class StateType(ABCMeta):
    """The class of states: their attribute `_shared_state` can be set.

    What is set takes the place of the state, and nothing is left of that where it is an empty dict. What the state was
    is kept. It is brought back where the attribute of the class is set back or deleted, as `mock.patch` and pytest's
    `monkeypatch` do: of one class in the opposite order, of several classes in any order.

    Attributes:
        _parts: names of the parts of the runtime, and of its settings, that a state of this class owns.
        _installs: whether to bring the state back is to bring the runtime back.
        _place: stands for the dict that the class has now.
    """

    _parts: tuple[str, ...]
    _installs: bool
    _place: object
    _reset_state: Callable[[], None]
    _list_shared: Callable[[], dict[str, Any]]
    # limited, because code that only sets the attribute never asks for what it was
    _kept: ClassVar[deque[tuple[object, SavedState]]] = deque(maxlen=_MAX_KEPT)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name != "_shared_state":
            super().__setattr__(name, value)
        elif isinstance(value, SharedStateAttribute):
            cls._bring_back()
        else:
            cls._replace(value)

    def __delattr__(cls, name: str) -> None:
        if name != "_shared_state":
            super().__delattr__(name)
        else:
            cls._bring_back()

    def _find_kept(cls, place: object) -> SavedState:
        """Return what the state was while the class had another dict, for which `place` stands."""
        found = (saved for at, saved in reversed(cls._kept) if at is place)
        return next(found, SavedState(cls, {}, None, {}))

    def _bring_back(cls) -> None:
        found = [number for number, (_, saved) in enumerate(cls._kept) if saved.state is cls]
        if not found:
            return
        cls._place, kept = cls._kept[found[-1]]
        del cls._kept[found[-1]]
        kept.restore()
        for _, later in list(cls._kept)[found[-1] :]:
            later.follow(kept)

    def _replace(cls, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(f"_shared_state is a dict, not {values!r}")
        before, wanted = SavedState.of(cls), dict(values)
        is_new = bool(wanted) and _SAVED not in wanted
        if is_new and (unknown := [name for name in wanted if not hasattr(cls, name)]):
            raise AttributeError(f"{unknown[0]!r} is no part of {cls.__name__}")
        try:
            cls._reset_state()
            if is_new:
                cls()
            SharedState(cls, cls._place).update(wanted)
        except Exception:
            before.restore()
            raise
        cls._kept.append((cls._place, before))
        own = values if isinstance(values, SharedState) and values._state is cls else None
        cls._place = object() if own is None else own._place


def _read(own: Runtime, name: str) -> Any:
    return getattr(own.settings if name in SETTINGS else own, name)


def _write(own: Runtime, name: str, value: Any) -> None:
    if name not in SETTINGS:
        setattr(own, name, value)
        return
    own.settings = replace(own.settings, **{name: value})
    if name == "debug":
        own.comm.debug = value
