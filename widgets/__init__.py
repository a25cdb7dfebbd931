"""Widgets for the notebook: a form for the options of a launch.

`%load_ext notebook_accel` gives `%accel_config`, which shows the form for the default config file, and `%accel_env` and
`%accel_doctor`, which show what this machine is and what hinders launches on it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .form import ConfigForm

__all__ = ["ConfigForm"]


def __getattr__(name: str) -> Any:
    """Import the form when it is asked for: the view of a run needs none of it."""
    if name == "ConfigForm":
        from .form import ConfigForm

        return ConfigForm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
