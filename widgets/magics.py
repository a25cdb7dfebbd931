"""What `%load_ext notebook_accel` gives a notebook."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError

from notebook_accel.config import document, file
from notebook_accel.diagnosis import repairs, report
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

    `%accel_doctor --fix` offers to repair what can be repaired without harm, and asks first; with `--yes` it does not.
    """
    words = line.split()
    if not set(words) <= {"--fix", "--yes"} or words == ["--yes"]:
        raise UsageError(f"%accel_doctor takes --fix, and --yes with it, and was given {line.strip()!r}")
    found = report.report_checks()
    if "--fix" in words and _repair(found, "--yes" in words):
        found = report.report_checks()
    return found


def _repair(found: report.DoctorReport, yes: bool) -> bool:
    """Do what the user wants done; return whether anything was."""
    changed = False
    for one in repairs.find(found.checks):
        print(repairs.describe(one))
        if isinstance(one, repairs.Repair) and (
            yes or input("Do it? [y/N] ").strip().lower() in ("y", "yes")
        ):
            print(repairs.apply(one))
            changed = True
    return changed


def _no_arguments(magic: str, line: str) -> None:
    if line.strip():
        raise UsageError(f"%{magic} takes no arguments, and was given {line.strip()!r}")
