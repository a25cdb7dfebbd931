"""What a benchmark returns, how contenders are timed side by side, and the table that `make bench` prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison: `ratio` is ours over the other's, so below 1 is faster than the other.

    Attributes:
        what: what was measured.
        other: what ours is compared with.
        ours_s: our median seconds.
        other_s: the other's median seconds.
        ratio: the median of the ratios of each round, which a slow moment of the machine moves little.
        target: the ratio that is promised, None where nothing is.
        unit: of what was measured, empty for seconds.
        lacks: why nothing was measured, such as `no GPU here`; empty where something was.
    """

    what: str
    other: str
    ours_s: float
    other_s: float
    ratio: float
    target: float | None = None
    unit: str = ""
    lacks: str = ""


def interleave(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Time every contender once a round, the order rotating and turning round, and return the seconds of each.

    Turning changes who comes after whom: what one leaves in the caches would be the gain of the same one each time.
    A contender does one round of work and returns the seconds it took.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        turns, shift = divmod(number, len(names))
        order = names[shift:] + names[:shift]
        for name in order[::-1] if turns % 2 else order:
            taken = contenders[name]()
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def compare(
    what: str, seconds: Mapping[str, Sequence[float]], targets: Mapping[str, float | None], per: int = 1
) -> list[Row]:
    """Return a row for each contender but `ours`; `per` divides the seconds, for rounds of many steps."""
    ours = seconds["ours"]
    return [
        Row(
            what=what,
            other=name,
            ours_s=statistics.median(ours) / per,
            other_s=statistics.median(theirs) / per,
            ratio=statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            target=targets.get(name),
        )
        for name, theirs in seconds.items()
        if name != "ours"
    ]


def leave_out(what: str, other: str, target: float, lacks: str) -> Row:
    """Return the row of what cannot be measured here.

    Args:
        what: see `Row`.
        other: see `Row`.
        target: see `Row`.
        lacks: why not.
    """
    nothing = float("nan")
    return Row(
        what=what,
        other=other,
        ours_s=nothing,
        other_s=nothing,
        ratio=nothing,
        target=target,
        lacks=lacks,
    )


def show_time(seconds: float) -> str:
    """Return seconds with a unit that leaves about three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def render(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    head = ("measured", "compared with", "ours", "theirs", "ratio", "target", "")
    lines = [
        (
            row.what,
            row.other,
            *(
                f"{value:.3g} {row.unit}" if row.unit else "" if row.lacks else show_time(value)
                for value in (row.ours_s, row.other_s)
            ),
            "" if row.lacks else f"{row.ratio:.2f}",
            "" if row.target is None else f"<= {row.target:g}",
            row.lacks or ("" if row.target is None else "met" if row.ratio <= row.target else "MISSED"),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    title = "  ".join(cell.ljust(width) for cell, width in zip(head, widths, strict=True))
    return "\n".join([title, "-" * len(title.rstrip()), *(text.rstrip() for text in texts)])
