"""LaunchRequest: what a user asked to launch. `preflight.check` checks it and makes a `Job` of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A function, its arguments and how to run it, as the user wrote it. No value is checked yet.

    Attributes:
        function: each process calls it, as `function(*args)`.
        args: positional arguments of the function.
        options: arguments of `notebook_launcher` by name. A missing one has its default. The table in
            `config.launch_options` says what each of them means.
        quiet: whether the run is neither announced nor listed by `runs()`: a dry launch or a session.
        serve: the workers of a session run this in place of the function; see `worker.main.WorkerSpec`.
    """

    function: Any
    args: Any = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False
    serve: Callable[..., None] | None = None
