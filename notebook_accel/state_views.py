"""What the states show of the runtime, also as the dicts that Accelerate has, which libraries read, set and clear."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, cast

from . import devices, runtime
from .choices import DistributedType
from .runtime import GradientFlags, Runtime, Settings, Slot

SHARED: Final = (
    *("_cpu", "backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
    *("local_process_index", "fork_launched"),
)
"""What all instances of a `PartialState` show."""
CHOSEN: Final = (
    *("mixed_precision", "dynamo_plugin", "fsdp_plugin", "deepspeed_plugins", "parallelism_config"),
)
"""What an accelerator has chosen."""
_PLACE: Final = ("backend", "device", "num_processes", "process_index", "local_process_index")
_DICT: Final[Any] = dict  # what a class does that derives from it besides another mapping is unknown to mypy


class StateResetError(RuntimeError, AttributeError):
    """A state has no values, because it was reset; `hasattr` and `getattr` with a default take it for a missing one."""


def describe_reset(kind: str) -> str:
    """Return the sentences of a state without values, in words that tests of libraries look for.

    Args:
        kind: the name of the state's class.
    """
    return (
        f"`{kind}` object has no attribute of a run. This happens if `{kind}._reset_state()` was called: "
        f"the state was reset: make a new {kind if kind == 'PartialState' else 'Accelerator'}"
    )


def attach(state: Any) -> Any:
    """Return a state with its attributes shared: they are the dict of its class, without what is from before a reset.

    Args:
        state: an instance.
    """
    shared, token = type(state)._find_dict(), getattr(runtime.current(), "token", None)
    if token is not shared._token:
        _DICT.clear(shared)
        shared._names, shared._token = frozenset(), token
    state.__dict__ = shared
    return state


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


@dataclass(frozen=True, repr=False, eq=False, slots=True)
class SavedState:
    """What the states were, to be brought back.

    Attributes:
        shown: what the state of one class showed, by name; empty where there was none.
        slot: where the runtime was.
        own: the runtime, None where there was none.
        settings: of the runtime.
        accelerated: of the runtime.
        gradient: the state of gradient accumulation, None where there was none.
        flags: what that was, by name.
    """

    shown: Mapping[str, Any]
    slot: Slot
    own: Runtime | None = None
    settings: Settings | None = None
    accelerated: bool = False
    gradient: GradientFlags | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, shown: Mapping[str, Any]) -> SavedState:
        """Return what the states are now.

        Args:
            shown: what one of them shows.
        """
        slot = runtime.slot()
        own, gradient = slot.runtime, slot.gradient
        flags = {} if gradient is None else list_values(gradient, gradient.__slots__)
        if own is None:
            return cls(shown, slot, gradient=gradient, flags=flags)
        return cls(shown, slot, own, own.settings, own.accelerated, gradient, flags)

    def restore(self, slot: Slot) -> None:
        """Bring all states back.

        Args:
            slot: gets the runtime.
        """
        self.restore_run(slot)
        self.restore_choices(slot)
        self.restore_gradient(slot)

    def restore_run(self, slot: Slot) -> None:
        """Bring back what a `PartialState` has: the runtime, and whether inputs of collectives are compared.

        Args:
            slot: gets the runtime.
        """
        slot.runtime = self.own
        if self.own is not None and self.settings is not None:
            self.own.settings = replace(self.own.settings, debug=self.settings.debug)
            self.own.comm.debug = self.settings.debug

    def restore_choices(self, slot: Slot) -> None:
        """Bring back what an `AcceleratorState` has besides: the choices of the accelerator.

        Args:
            slot: gets the runtime that they are of; where there was no accelerator, its own has none either.
        """
        if self.own is not None and self.settings is not None:
            self.own.settings = replace(self.settings, debug=self.own.settings.debug)
            self.own.accelerated = self.accelerated
        if self.accelerated:
            slot.runtime = self.own
        elif slot.runtime is not None:
            slot.runtime.accelerated = False

    def restore_gradient(self, slot: Slot) -> None:
        """Bring back the state of gradient accumulation.

        Args:
            slot: its runtime gets it.
        """
        for name, value in self.flags.items():
            setattr(self.gradient, name, value)
        slot.gradient = self.gradient
        if self.own is not None and self.gradient is not None:
            self.own.gradient = self.gradient


class Name(str):
    """The name of a value in a copy of a state's dict; whoever has the copy can bring the state back.

    Attributes:
        saved: what the state was.
    """

    __slots__ = ("saved",)
    saved: SavedState

    def __new__(cls, text: str, saved: SavedState) -> Name:
        made = super().__new__(cls, text)
        made.saved = saved
        return made

    def __deepcopy__(self, memo: Any) -> Name:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class SharedState(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc,metaclass]
    """The class attribute `_shared_state`: what a state shows, by name; empty where there is none.

    What is set here counts at once. Where another dict was set in its place, this shows what the state was before.
    A copy is a plain dict. It brings the state back as it was, where it is set in place of this or put into it. A
    pickle is a plain dict of values.

    Code in C, such as that of an object whose `__dict__` this is, reads and sets the underlying dict. It finds what
    the state showed when the class was last asked for this. What it sets under other names stays until a reset.

    Args:
        state: the class of the state.
    """

    __slots__ = ("_home", "_names", "_saved", "_state", "_token")

    def __init__(self, state: StateType) -> None:
        super().__init__()
        self._state = state
        self._home = runtime.values_of_thread()
        self._names: frozenset[str] = frozenset()
        self._token: object = None
        self._saved: SavedState | None = None

    def __get__(self, instance: Any, owner: StateType) -> SharedState:
        own = owner._find_dict()
        own._fill()
        return own

    def __set__(self, instance: Any, values: Any) -> None:
        type(instance)._shared_state = values

    def _fill(self) -> dict[str, Any]:
        """Put what the state shows into the underlying dict, and return all that is there then."""
        if self._saved is not None:
            return dict(self._saved.shown)
        shown = self._state._list_shared()
        names, token = frozenset(shown), getattr(runtime.current(), "token", None)
        if shown and token is self._token:
            shown = {
                name: value for name, value in list(_DICT.items(self)) if name not in self._names
            } | shown
        self._names, self._token = names, token
        for name in list(_DICT.keys(self)):  # other threads read and fill it too
            if name not in shown:
                _DICT.pop(self, name, None)
        _DICT.update(self, shown)
        return dict(shown)

    def _save(self) -> SavedState:
        """Return what the state is; what it was, where the class has another dict."""
        return self._saved or SavedState.of(_detach(self._fill()))

    def _tag(self, values: Mapping[str, Any]) -> dict[str, Any]:
        saved = self._saved or SavedState.of(_detach(values))
        return {Name(name, saved): value for name, value in values.items()}

    def _restore(self, saved: SavedState, slot: Slot) -> None:
        """Bring a state back, also the values under names of the user."""
        self._state._restore(saved, slot)
        self._fill()
        _DICT.update(self, {str(name): saved.shown[name] for name in saved.shown.keys() - self._names})

    def belongs_to(self, state: StateType) -> bool:
        """Return whether it is one that a class had in this thread, if that is a rank, or in the others.

        Args:
            state: the class.
        """
        return self._state is state and self._home is runtime.values_of_thread()

    def leave(self) -> None:
        """Show from now on what the state is now."""
        self._saved = self._save()

    def enter(self) -> None:
        """Bring the state back that was left, and show what it is from then on."""
        if (saved := self._saved) is not None:
            self._saved = None
            try:
                if self._state._enters:
                    runtime.enter(saved.slot)
                self._restore(saved, saved.slot)
            except BaseException:
                self._saved = saved
                raise

    def copy(self) -> dict[str, Any]:
        """Return a plain dict that brings the state back as it is now."""
        return self._tag(self._fill())

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return self._tag(_detach(self._fill()))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (_detach(self._fill()),)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __getitem__(self, name: str) -> Any:
        values = self._fill()
        if isinstance(name, Name) and name not in values:  # another thread reset the state since
            return name.saved.shown[name]
        return values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __len__(self) -> int:
        return len(self._fill())

    def __repr__(self) -> str:
        return repr(self._fill())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, values: Any) -> Any:
        return self.copy() | values

    def __ror__(self, values: Any) -> Any:
        return dict(values) | self.copy()

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, values: Any = (), /, **named: Any) -> None:
        """Set values of the state; a copy of an earlier one brings that back.

        Args:
            values: by name, or pairs.
            named: more of them.

        Raises:
            AttributeError: a value is no part of the state, or cannot be set; all stay as they were.
            TypeError: the class has another dict.
        """
        if self._saved is not None:
            raise TypeError(f"{self._state.__name__} has another _shared_state: this one does not change")
        wanted, before = dict(values, **named), self._save()
        try:
            if (saved := _find_saved(wanted)) is not None:
                self._restore(saved, runtime.slot())
            shown = self._fill()
            changed = {
                name: value for name, value in wanted.items() if name not in shown or shown[name] != value
            }
            self._state._refuse_unknown(changed)
            kind: Any = self._state
            made = kind.__new__(kind) if shown or not changed else kind()
            for name, value in changed.items():
                setattr(made, name, value)
        except BaseException:  # an interrupt too leaves all as it was
            before.restore(before.slot)
            raise

    def __ior__(self, values: Any) -> SharedState:
        self.update(values)
        return self

    def clear(self) -> None:
        """Remove the state."""
        if self._saved is None:
            self._state._reset_state()
        else:
            self._saved = SavedState({}, self._saved.slot)
        _DICT.clear(self)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        raise TypeError(f"{name!r} cannot be removed from a state: clear() removes the state")

    def popitem(self) -> tuple[str, Any]:
        """Raise TypeError: no value can be removed."""
        raise TypeError("no value can be removed from a state: clear() removes the state")


class StateType(ABCMeta):
    """The class of states: each has a `_shared_state`, which can be set; in a thread that is a rank, one of its own.

    What is set takes the place of the state, and nothing is left of that where it is an empty dict. The dict that was
    there keeps what the state was. Set back, as `mock.patch` and pytest's `monkeypatch` do, it brings the state back:
    of one class in the opposite order, of several classes in any order.

    Attributes:
        _restore: brings back, of what was saved, what a state of this class has.
        _enters: whether that is the runtime, so that another dict is another place for one.
    """

    _shared_state: Any
    _restore: Callable[[SavedState, Slot], None]
    _enters: bool
    _reset_state: Callable[[], None]
    _list_shared: Callable[[], dict[str, Any]]

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace, **kwargs)
        # also in place of a dict in the body of the class
        super().__setattr__("_shared_state", SharedState(cls))

    def __setattr__(cls, name: str, value: Any) -> None:
        if name != "_shared_state":
            super().__setattr__(name, value)
        elif not isinstance(value, Mapping):
            raise TypeError(f"_shared_state is a dict, not {value!r}")
        elif value is not (current := cls._shared_state):
            own = value if isinstance(value, SharedState) and value.belongs_to(cls) else None
            values = dict(value)  # copied first: it may be a view of the state that is removed below
            if _find_saved(values) is None:
                cls._refuse_unknown(values)
            try:
                current.leave()
                cls._put_dict(SharedState(cls) if own is None else own)
                cls._begin(values) if own is None else own.enter()
            except BaseException:  # an interrupt too leaves all as it was
                cls._put_dict(current)
                current.enter()
                raise

    def __getattribute__(cls, name: str) -> Any:
        """Return an attribute; `mock.patch` and `monkeypatch` find in `__dict__` what they set back."""
        found = super().__getattribute__(name)
        if name != "__dict__" or "_shared_state" not in found or runtime.values_of_thread() is None:
            return found
        return MappingProxyType({**found, "_shared_state": cls._find_dict()})

    def _find_dict(cls) -> SharedState:
        values = runtime.values_of_thread()
        found: Any = super().__dict__["_shared_state"] if values is None else values.get(cls)
        if found is None and values is not None:
            found = values[cls] = SharedState(cls)
        return cast("SharedState", found)

    def _put_dict(cls, shared: SharedState) -> None:
        if (values := runtime.values_of_thread()) is None:
            super().__setattr__("_shared_state", shared)
        else:
            values[cls] = shared

    def __delattr__(cls, name: str) -> None:
        if name == "_shared_state":
            raise AttributeError(
                f"{cls.__name__} needs a _shared_state: set an empty dict to remove the state"
            )
        super().__delattr__(name)

    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        if unknown := [name for name in names if not hasattr(cls, name)]:
            raise AttributeError(f"{unknown[0]!r} is no part of {cls.__name__}")

    def _begin(cls, values: Mapping[str, Any]) -> None:
        """Replace the state by one of these values; by none where there are none."""
        if cls._enters:
            runtime.enter(Slot())
        else:
            cls._reset_state()
        if values and _find_saved(values) is None:
            cls()
            shown = cls._shared_state
            if wrong := [name for name in _PLACE if values.get(name, shown.get(name)) != shown.get(name)]:
                raise AttributeError(
                    f"{wrong[0]!r} of a new {cls.__name__} is found, not set: set it afterwards"
                )
        cls._shared_state.update(values)


def _find_saved(values: Iterable[str]) -> SavedState | None:
    """Return what the state was that a dict is a copy of; None for other dicts."""
    return next((name.saved for name in values if isinstance(name, Name)), None)


def _detach(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with copies of those that are dicts."""
    return {
        name: dict(value) if isinstance(value, MutableMapping) else value for name, value in values.items()
    }
