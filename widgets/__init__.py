"""Widgets for the notebook: a form for the options of a launch.

`%load_ext notebook_accel` gives `%accel_config`, which shows the form for the default config file.
"""

from .form import ConfigForm

__all__ = ["ConfigForm"]
