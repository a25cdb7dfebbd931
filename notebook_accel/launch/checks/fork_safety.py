"""Resolves how workers start, by what forbids a fork of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ...config.launch_options import StartMethod
from ..job import Job
from ..script import Script
from . import fork_obstacles


def resolve_start_method(problems: list[Exception], job: Job) -> StartMethod:
    """Return how the processes of a job start.

    `auto` becomes `fork` if this process may be forked, else `fresh`.

    Args:
        problems: takes what is wrong with the user's choice.
        job: its start method is the user's choice.

    Returns:
        `fork` or `fresh`.
    """
    asked = job.start_method
    if asked == "auto" and isinstance(job.function, Script):
        asked = "fresh"  # what libraries read as they are imported is to be as it would be without a launcher
    if asked == "fresh":
        _check_directory(problems)
        return asked
    found = list(map(str, fork_obstacles.reasons()))
    if job.options.get("detach"):
        found.append("with detach=True the workers outlive this process")
    if job.rendezvous.num_nodes > 1:
        found.append("a thread of this process may serve other nodes at that moment")
    if job.background:
        found.append("this process goes on while workers start")
    if asked == "fork" and found:
        why = "; ".join(found)
        text = f"start_method='fork': a forked worker could hang or fail, because {why}; choose 'auto'"
        problems.append(ValueError(text))
    if asked == "auto" and choose_start_method(found) != "fork":
        _check_directory(problems)
        return "fresh"
    return "fork"


def choose_start_method(reasons: Sequence[object]) -> StartMethod:
    """Return how processes start if the user did not choose.

    Args:
        reasons: why this process may not be forked; empty if it may be.
    """
    return "fork" if sys.platform == "linux" and not reasons else "fresh"


def _check_directory(problems: list[Exception]) -> None:
    """Check that the working directory exists: fresh processes start in it."""
    try:
        os.getcwd()
    except OSError as error:
        text = f"the working directory cannot be used ({error.strerror}): change to another with os.chdir"
        problems.append(ValueError(text))
