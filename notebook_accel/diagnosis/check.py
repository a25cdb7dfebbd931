"""The result of one check of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: of the check.
        status: `ok`; `warning` where some launches fail or are slow; `problem` where all do.
        text: what was found, with its values.
        remedy: how to fix it; empty where nothing has to be done.
        command: what to type in a shell for it; empty where there is no such thing.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    command: str = ""

    @property
    def as_script(self) -> str:
        """A line of shell script: the command, or a comment with the remedy; empty where nothing has to be done."""
        return self.command or (f"# {self.name}: {self.remedy}" if self.remedy else "")


def as_line(check: Check, status: str | None = None) -> str:
    """Return a check as a line; `status` is its status as shown, such as a coloured one."""
    remedy = f" -> {check.remedy}" if check.remedy else ""
    return f"{status or f'{check.status:<8}'} {check.name}: {check.text}{remedy}"
