"""What `%load_ext notebook_accel` gives a notebook."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError

from notebook_accel.config import document, file
from notebook_accel.diagnosis import report
from notebook_accel.errors import ConfigError

from .cells import SessionMagics
from .form import ConfigForm


def register(shell: Any) -> None:
    """Give a shell the magics."""
    for magic in (accel_config, accel_env, accel_doctor):
        shell.register_magic_function(magic, "line", magic.__name__)
    SessionMagics(shell).register()


def accel_config(line: str) -> ConfigForm:
    """Show the form for a config file, `%accel_config path`, by default the one that all tools look for."""
    path = line.strip().strip("'\"") or file.default_path()
    form = ConfigForm(path=path)
    if document.expand(form.path).exists():
        try:
            form.load(form.path)
        except ConfigError as error:
            print(f"{error}\nThe form shows what fits this machine instead.")
    return form


def accel_env(line: str) -> report.EnvironmentReport:
    """Show what a bug report should say about this machine and this kernel, without secrets."""
    _no_arguments("accel_env", line)
    return report.report_environment()


def accel_doctor(line: str) -> report.DoctorReport:
    """Show what hinders launches from this kernel, and how to mend it.

    `%accel_doctor --fix` prints the commands that mend it, to be typed in a terminal.
    """
    if line.strip() not in ("", "--fix"):
        raise UsageError(f"%accel_doctor takes --fix, and was given {line.strip()!r}")
    found = report.report_checks()
    if line.strip():
        print("\n".join(filter(None, (check.as_script for check in found.checks))))
    return found


def _no_arguments(magic: str, line: str) -> None:
    if line.strip():
        raise UsageError(f"%{magic} takes no arguments, and was given {line.strip()!r}")
