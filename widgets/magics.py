"""What `%load_ext notebook_accel` gives a notebook."""

from __future__ import annotations

from typing import Any

from notebook_accel.config import file
from notebook_accel.errors import ConfigError

from .cells import SessionMagics
from .form import ConfigForm


def register(shell: Any) -> None:
    """Give a shell the magics."""
    shell.register_magic_function(accel_config, "line", "accel_config")
    SessionMagics(shell).register()


def accel_config(line: str) -> ConfigForm:
    """Show the form for a config file, `%accel_config path`, by default the one that all tools look for."""
    path = line.strip().strip("'\"") or file.default_path()
    form = ConfigForm(path=path)
    if form.path.expanduser().exists():
        try:
            form.load(form.path)
        except ConfigError as error:
            print(f"{error}\nThe form shows what fits this machine instead.")
    return form
