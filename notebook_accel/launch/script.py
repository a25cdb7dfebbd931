"""A script, a module or a program as what a launch runs in place of a function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from . import main_module

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What `python FILE`, `python -m MODULE` or a command line would run; calling it runs it in this process.

    Where the job's workers are spawned on this machine, each is a fresh interpreter that does nothing else.

    Attributes:
        kind: `script` is a Python file, `module` a Python module, `program` anything that the system can run.
        words: its name and its arguments.
    """

    kind: Kind
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.words[0])  # by which messages name what is launched

    def __call__(self) -> None:
        """Run it here.

        Raises:
            SystemExit: it ended with an exit code other than 0.
            BaseException: what the script or module raised.
        """
        __tracebackhide__ = True
        try:
            main_module.run(self.kind, self.words)
        finally:
            main_module.flush_files()
