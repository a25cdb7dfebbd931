"""What the states show of the runtime, also as the dicts that Accelerate has, which libraries read and clear."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from . import devices, runtime
from .choices import DistributedType
from .runtime import GradientFlags, Runtime

SHARED: Final = (
    *("backend", "device", "debug", "distributed_type", "num_processes", "process_index"),
    *("local_process_index", "fork_launched"),
)
"""What all instances of a `PartialState` show."""
CHOSEN: Final = (
    *("mixed_precision", "dynamo_plugin", "fsdp_plugin", "deepspeed_plugins", "parallelism_config"),
)
"""What an accelerator has chosen."""


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


class SharedState(dict[str, Any]):
    """What a state shows, by name, as it is now; empty where there is none.

    Args:
        values: the values.
        put: sets a value of the state.
        reset: removes the state.
        restore: brings the state back that there is now.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        put: Callable[[str, Any], None],
        reset: Callable[[], None],
        restore: Callable[[], None],
    ) -> None:
        super().__init__(values)
        self._put = put
        self._reset = reset
        self.restore = restore

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)
        super().__setitem__(name, value)

    def clear(self) -> None:
        """Remove the state."""
        self._reset()
        super().clear()

    def copy(self) -> SharedState:
        """Return what brings the state back, where it is set or put into this again."""
        return SharedState(self, self._put, self._reset, self.restore)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> SharedState:
        return self.copy()

    def update(self, *values: Any, **named: Any) -> None:
        """Set values of the state; all of an earlier one, whose copy is given, is brought back."""
        for one in values:
            if isinstance(one, SharedState) and one:
                one.restore()
                super().update(one)
            else:
                named = {**dict(one), **named}
        for name, value in named.items():
            self[name] = value

    def __ior__(self, values: Any) -> SharedState:  # type: ignore[override,misc]
        self.update(values)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a value, which is set where there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name!r} cannot be removed from a state: clear() removes the state")

    def pop(self, name: str, *default: Any) -> Any:
        """Return the default for a name that is not there; no value can be removed."""
        if name in self:
            del self[name]
        if not default:
            raise KeyError(name)
        return default[0]

    def popitem(self) -> tuple[str, Any]:
        """Raise TypeError: no value can be removed."""
        raise TypeError("no value can be removed from a state: clear() removes the state")


class SharedStateAttribute:
    """The class attribute `_shared_state` of a state, with the methods `_list_shared` and `_reset_state`."""

    def __get__(self, instance: Any, owner: Any) -> SharedState:
        def put(name: str, value: Any) -> None:
            if not hasattr(owner, name):
                raise AttributeError(f"{name!r} is no part of {owner.__name__}")
            setattr(instance or owner(), name, value)

        return SharedState(owner._list_shared(), put, owner._reset_state, _keep(runtime.current()))


class StateType(ABCMeta):
    """The class of states: their attribute `_shared_state` can be set.

    `{}` removes the state, a value that it had before brings that state back, and other values are put into a new one.
    `mock.patch` sets the attribute itself back, or deletes it where a base class has it: both bring the state back that
    was there before.
    """

    _shared_state: Any
    _kept: SharedState | None  # what it was before it was set

    def __setattr__(cls, name: str, value: Any) -> None:
        if name != "_shared_state":
            super().__setattr__(name, value)
        elif isinstance(value, SharedStateAttribute):
            cls._bring_back()
        elif isinstance(value, SharedState) and value:
            value.restore()
        else:
            cls._replace(dict(value))

    def __delattr__(cls, name: str) -> None:
        if name != "_shared_state":
            super().__delattr__(name)
        else:
            cls._bring_back()

    def _bring_back(cls) -> None:
        kept = vars(cls).get("_kept")
        if kept is not None:
            super().__setattr__("_kept", None)
            kept.restore()

    def _replace(cls, values: dict[str, Any]) -> None:
        if values == vars(cls).get("_kept"):
            return cls._bring_back()
        shared = cls._shared_state
        if unknown := [key for key in values if key not in shared and not hasattr(cls, key)]:
            raise AttributeError(f"{unknown[0]!r} is no part of {cls.__name__}")
        if shared:
            super().__setattr__("_kept", shared.copy())
        shared.clear()
        if values and not cls._shared_state:
            cls()
        now = cls._shared_state
        for key, value in values.items():
            if key not in now or now[key] != value:
                now[key] = value


def _keep(installed: Runtime | None) -> Callable[[], None]:
    """Return what brings a runtime back, with what is reset in it."""
    if installed is None:
        return runtime.reset
    settings, accelerated, gradient = installed.settings, installed.accelerated, installed.gradient

    def restore() -> None:
        installed.settings, installed.accelerated, installed.gradient = settings, accelerated, gradient
        if runtime.current() is not installed:
            runtime.install(installed)

    return restore


class AccumulationChoices(MutableMapping[str, Any]):
    """The batches of a step, and the other choices that differ from their defaults; what is set here counts at once.

    Args:
        flags: have all of them.
    """

    NAMES: Final = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")

    def __init__(self, flags: GradientFlags) -> None:
        self._flags = flags

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, name: str) -> Any:
        if name not in list(self):
            raise KeyError(name)
        return getattr(self._flags, name)

    def clear(self) -> None:
        """Set all choices to their defaults."""
        self.replace({})

    def replace(self, values: Mapping[str, Any]) -> None:
        """Set all choices.

        Args:
            values: choices by name; the others get their defaults.
        """
        defaults = GradientFlags()
        self.update({name: getattr(defaults, name) for name in self.NAMES} | dict(values))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.NAMES:
            raise KeyError(
                f"{name!r} is no choice of gradient accumulation, choose among {', '.join(self.NAMES)}"
            )
        setattr(self._flags, name, value)

    def __delitem__(self, name: str) -> None:
        if name not in list(self):
            raise KeyError(name)
        setattr(self._flags, name, getattr(GradientFlags(), name))

    def __iter__(self) -> Iterator[str]:
        defaults = GradientFlags()
        return (
            name
            for name in self.NAMES
            if name == "num_steps" or getattr(self._flags, name) != getattr(defaults, name)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


def list_flags(flags: GradientFlags) -> dict[str, Any]:
    """Return what a `GradientState` shows, by name."""
    return {"sync_gradients": flags.sync_gradients, "plugin_kwargs": AccumulationChoices(flags)}
