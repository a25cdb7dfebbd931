"""Progress bars that one process shows, under Accelerate's name."""

from __future__ import annotations

from typing import Any

from ..state import PartialState
from ..takeover.names import complete_names

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of `tqdm.auto`, by default shown in the first process of each node only.

    Args:
        args: for tqdm.
        main_process_only: False shows a bar in each process.
        kwargs: for tqdm.

    Raises:
        ValueError: the first argument is a boolean, as in older versions.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ValueError(f"tqdm({args[0]}, ...): name this argument, main_process_only={args[0]}")
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = PartialState().local_process_index != 0
    return bar(*args, **kwargs, disable=disable)


complete_names(__name__)
