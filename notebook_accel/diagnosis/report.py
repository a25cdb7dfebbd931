"""What notebooks show of this machine and of what hinders launches: as text, and as HTML without scripts."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final

from . import checks, environment
from .check import Check, Status, as_line
from .environment import Environment

# Text has the colours of the page, so that it reads in light and dark themes; these are for the rule beside it.
_RULES: Final[dict[Status, str]] = {"ok": "#2e9d57", "warning": "#d98c00", "problem": "#d9413b"}
_SIGNS: Final[dict[Status, str]] = {"ok": "✓", "warning": "!", "problem": "✗"}


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """A block to paste into a bug report."""

    environment: Environment

    def __repr__(self) -> str:
        return environment.as_text(self.environment)

    def _repr_html_(self) -> str:
        return (
            f'<pre style="white-space: pre-wrap; color: inherit; background: none">{escape(repr(self))}</pre>'
        )


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What hinders launches, and how to fix it."""

    checks: tuple[Check, ...]

    @property
    def summary(self) -> str:
        """How many problems and warnings there are."""
        counts = [
            (sum(check.status == status for check in self.checks), status)
            for status in ("problem", "warning")
        ]
        found = [f"{count} {status}{'s' if count > 1 else ''}" for count, status in counts if count]
        return " and ".join(found) or "nothing hinders launches"

    def __repr__(self) -> str:
        return "\n".join([*map(as_line, self.checks), self.summary])

    def _repr_html_(self) -> str:
        rows = "".join(map(_row, self.checks))
        return (
            '<table style="border-collapse: collapse; color: inherit"><thead><tr>'
            + "".join(
                f'<th scope="col" style="text-align: left; padding: 2px 8px">{name}</th>'
                for name in ("", "what", "finding")
            )
            + f"</tr></thead><tbody>{rows}</tbody></table><p>{escape(self.summary)}</p>"
        )


def _row(check: Check) -> str:
    style = "text-align: left; vertical-align: top; padding: 2px 8px"
    cell = f'<td style="{style}">'
    remedy = f"<br><b>mend:</b> {escape(check.remedy)}" if check.remedy else ""
    return (
        f'<tr><td style="{style}; white-space: nowrap; font-weight: bold; '
        f'border-left: 4px solid {_RULES[check.status]}">'
        f"{_SIGNS[check.status]} {check.status}</td>"
        f'<td style="{style}; white-space: nowrap">{escape(check.name)}</td>'
        f"{cell}{escape(check.text)}{remedy}</td></tr>"
    )


def report_environment() -> EnvironmentReport:
    """Return what a bug report should say about this machine and process."""
    return EnvironmentReport(environment.collect())


def report_checks() -> DoctorReport:
    """Return what hinders launches from this process."""
    return DoctorReport(tuple(checks.run_checks()))
