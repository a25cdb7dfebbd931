"""GeneralTracker: what the accelerator asks of a tracker, and who may act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from ..state import PartialState

_Method = TypeVar("_Method", bound=Callable[..., Any])


class GeneralTracker:
    """Base of trackers: `start` opens a run, `log` adds to it, `finish` closes it.

    A subclass defines `name` and `requires_logging_directory`, on the class or before it calls `__init__` here,
    and `tracker`, which is the library's own object. It overrides the methods that mean something to its library.
    One that is made by name gets the project's name, then the logging directory where it requires one, then the
    keywords of `init_kwargs`.

    Attributes:
        name: what `log_with`, `init_kwargs`, `log_kwargs` and `get_tracker` call it.
        requires_logging_directory: True if it writes to the accelerator's `logging_dir`.
        main_process_only: True makes methods decorated with `on_main_process` do nothing outside rank 0.

    Raises:
        NotImplementedError: the subclass lacks `name`, `requires_logging_directory` or `tracker`.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    # kept by the class that defines the contract, as `ABCMeta.register` keeps its classes
    _registered: ClassVar[Mapping[str, type[GeneralTracker]]] = {}

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        needed = ("name", "requires_logging_directory", "tracker")
        present = dir(self)  # not hasattr: `tracker` may need a started run
        missing = [attribute for attribute in needed if attribute not in present]
        if missing:
            raise NotImplementedError(f"{type(self).__name__} does not define {', '.join(missing)}")

    def start(self) -> None:
        """Open the run; called by `init_trackers`, when the process group stands."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values to the run; `kwargs` are the library's own."""

    def finish(self) -> None:
        """Close the run."""


class SilentTracker(GeneralTracker):
    """Stands for a tracker in the processes that do not track: every method of it does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(_blank=True)
        self.name = name
        self.requires_logging_directory = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing

    @property
    def tracker(self) -> SilentTracker:
        """Itself: the library's object does nothing either."""
        return self


def on_main_process(method: _Method) -> _Method:
    """Decorate a tracker's method to do nothing outside rank 0, where the tracker is `main_process_only`.

    The process is looked at when the method is called, not before.
    """

    @wraps(method)
    def guarded(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and not PartialState().is_main_process:
            return None
        return method(self, *args, **kwargs)

    return cast(_Method, guarded)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None
