"""GeneralTracker: what the accelerator asks of a tracker, and who may act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from ..state import PartialState

_Method = TypeVar("_Method", bound=Callable[..., Any])


class GeneralTracker:
    """Base of trackers: `start` opens a run, `log` adds values to it, `finish` closes it.

    A subclass sets `name` and `requires_logging_directory`, on the class or before it calls `__init__` here. It also
    has a `tracker`: the library's own object. It overrides the methods for which its library has something to do.
    It leaves out values that the library cannot take, with a warning: see `values.warn_dropped`.

    A tracker that `log_with` names is made with the project's name, then the logging directory where it requires one,
    then the keywords of `init_kwargs`.

    Attributes:
        name: the name of the tracker in `log_with`, `init_kwargs`, `log_kwargs` and `get_tracker`.
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
        """Open the run. `init_trackers` calls it, when the process group exists."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's hyperparameters.

        Args:
            values: the hyperparameters by name; values may be nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add values to the run.

        Args:
            values: numbers, tensors of one element, texts and whatever else the library takes, by name.
            step: the step that they belong to; None lets the library choose.
            kwargs: for the library's own function.
        """

    def finish(self) -> None:
        """Close the run."""


def check_tracker_class(kind: Any) -> type[GeneralTracker]:
    """Return a class that `log_with` can make by name, as it is.

    Args:
        kind: what was registered, or what a package offers.

    Raises:
        ValueError: it is no subclass of GeneralTracker, or lacks `name` or `requires_logging_directory`.
    """
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
        raise ValueError(f"a tracker has to be a subclass of GeneralTracker, not {kind!r}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{kind.__name__}.name is {name!r}: it has to be a text")
    if not hasattr(kind, "requires_logging_directory"):
        raise ValueError(
            f"{kind.__name__} lacks requires_logging_directory: set it to True or False on the class"
        )
    if name == "all":
        raise ValueError(
            f"{kind.__name__}.name is 'all', which stands for every installed tracker: choose another"
        )
    return kind


class SilentTracker(GeneralTracker):
    """Stands for a tracker in the processes that do not track: each of its methods does nothing."""

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

    The rank is read when the method is called, not before.

    Args:
        method: a method of a GeneralTracker.

    Returns:
        The method; it returns None where it does nothing.
    """

    @wraps(method)
    def call_on_main(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if self.main_process_only and not PartialState().is_main_process:
            return None
        return method(self, *args, **kwargs)

    return cast(_Method, call_on_main)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None
