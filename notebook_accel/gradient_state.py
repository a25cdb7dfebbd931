"""GradientState: where gradient accumulation stands, under Accelerate's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar, Final

from . import runtime, state_pickles
from . import state_views as views
from .runtime import GradientFlags


class GradientState(metaclass=views.StateType):
    """The state of gradient accumulation.

    Args:
        gradient_accumulation_plugin: its `to_kwargs` returns new values by name, of `num_steps`, `adjust_scheduler`,
            `sync_with_dataloader` and `sync_each_batch`.
    """

    _shared_state: ClassVar[Any]
    _restore: ClassVar = views.SavedState.restore_gradient
    _enters: ClassVar = False

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        choices = AccumulationChoices(self._flags)
        if gradient_accumulation_plugin is not None:
            choices.replace(gradient_accumulation_plugin.to_kwargs())
        views.attach(self)

    __getstate__ = state_pickles.list_own
    __setstate__ = state_pickles.set_own

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )

    @classmethod
    def _list_shared(cls) -> dict[str, Any]:
        """Return what all instances show, by name; nothing before the first instance or runtime."""
        flags = runtime.slot().gradient
        if flags is None:
            return {}
        return {"sync_gradients": flags.sync_gradients, "plugin_kwargs": AccumulationChoices(flags)}

    @classmethod
    def _reset_state(cls) -> None:
        """Set all flags to their defaults."""
        runtime.slot().gradient = None

    @property
    def _flags(self) -> GradientFlags:
        slot = runtime.slot()
        if (flags := slot.gradient) is None:
            flags = slot.gradient = GradientFlags()
        return flags

    @property
    def initialized(self) -> bool:
        """True, because the flags have defaults."""
        return True

    @property
    def plugin_kwargs(self) -> MutableMapping[str, Any]:
        """The batches of a step, and the other choices that differ from their defaults; what is set counts at once."""
        return AccumulationChoices(self._flags)

    @plugin_kwargs.setter
    def plugin_kwargs(self, values: Mapping[str, Any]) -> None:
        AccumulationChoices(self._flags).replace(values)

    @property
    def sync_gradients(self) -> bool:
        """True when the next step of an optimizer is due."""
        return self._flags.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._flags.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._flags.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self._flags.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """The user's choice; has no effect, schedules always step with the optimizer."""
        return self._flags.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """True if a step follows the last batch of a loader."""
        return self._flags.sync_with_dataloader

    @property
    def end_of_dataloader(self) -> bool:
        """True while the loop works on the last batch of the active loader."""
        return self._flags.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of samples in the last batch of all processes without duplicates; -1 where it is unknown."""
        return self._flags.remainder

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated."""
        return self._flags.active is not None

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being iterated, None without one."""
        return self._flags.active

    @property
    def dataloader_references(self) -> list[Any]:
        """A None, and the prepared loaders that are being iterated, innermost last."""
        return [None, *(iteration.loader for iteration in self._flags.iterations)]

    @property
    def is_xla_gradients_synced(self) -> bool:
        """True if gradients on XLA devices have been averaged since the last step; set it if your code averages."""
        return self._flags.xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._flags.xla_gradients_synced = is_synced


_DEFAULTS: Final = GradientFlags()
"""What no one has changed; nothing writes it."""


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

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __getitem__(self, name: str) -> Any:
        if not self._shows(name):
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
        self.update({name: getattr(_DEFAULTS, name) for name in self.NAMES} | dict(values))

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.NAMES:
            raise KeyError(
                f"{name!r} is no choice of gradient accumulation, choose among {', '.join(self.NAMES)}"
            )
        setattr(self._flags, name, value)

    def __delitem__(self, name: str) -> None:
        if not self._shows(name):
            raise KeyError(name)
        setattr(self._flags, name, getattr(_DEFAULTS, name))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.NAMES if self._shows(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _shows(self, name: object) -> bool:
        """Return whether a name is that of a choice which is shown; Trainer asks for one at every step."""
        if name == "num_steps":
            return True
        return name in self.NAMES and getattr(self._flags, name) != getattr(_DEFAULTS, name)
