"""Widgets for the notebook: a form for the options of a launch.

`%load_ext notebook_accel` gives `%accel_config`, which shows the form for the default config file, and `%accel_env` and
`%accel_doctor`, which show what this machine is and what hinders launches on it.
"""

from .form import ConfigForm

__all__ = ["ConfigForm"]
