"""Programs that the processes of a launch can run; Accelerate's package has more of them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `python -m` warns of programs that their package has imported already
    from . import test_ops as test_ops
    from . import test_script as test_script
    from . import test_sync as test_sync

_PROGRAMS = ("test_ops", "test_script", "test_sync")


def __getattr__(name: str) -> Any:
    if name in _PROGRAMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
