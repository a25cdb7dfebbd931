"""Renders the ranks of a run as a table of HTML: a row for each, or for those of many that are alike."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from notebook_accel.launch.durations import format_duration

from .lines import WRONG
from .picture import BAD, Picture, RankState, Usage

MOST_ROWS: Final = 16
"""With more ranks, those that are in the same state have one row."""
MOST_SINGLE: Final = 256
"""With more ranks, there is no table and no text that has a row for each."""
SIGNS: Final = {
    "queued": "◌",
    "starting": "○",
    "running": "●",
    "waiting": "◐",
    "done": "✓",
    "failed": "✗",
    "killed": "✗",
    "stopped": "■",
    "left": "…",
}
CELL: Final = "text-align:left;padding:2px 12px 2px 0;white-space:nowrap"


def render_table(picture: Picture, *, every_rank: bool = False) -> str:
    """Return an HTML table of the ranks. Empty columns are left out.

    Args:
        picture: the run.
        every_rank: whether each rank has a row. By default those of more than `MOST_ROWS` that are in the same state,
            and on one node if there are not too many, have one, with the smallest and the largest of their values; what
            has failed comes first.
    """
    alone = every_rank or len(picture.ranks) <= MOST_ROWS
    groups = [(state,) for state in picture.ranks] if alone else group_alike(picture.ranks)
    columns: dict[str, list[str]] = {
        "rank" if alone else "ranks": [describe_ranks([state.rank for state in group]) for group in groups],
        "node": [_describe_nodes(group) for group in groups],
        "status": [describe_rank_status(_find_longest(group)) for group in groups],
        "step": [_span([state.step for state in group], lambda step: f"{step:,}") for group in groups],
        "steps/s": [_span([state.rate for state in group], lambda rate: f"{rate:.3g}") for group in groups],
        "memory": [_span(_list_usage(group, "memory"), format_bytes) for group in groups],
        "CPU": [_span(_list_usage(group, "cpu"), format_percent) for group in groups],
        "GPU memory": [_span(_list_usage(group, "device_memory"), format_bytes) for group in groups],
        "GPU": [_span(_list_usage(group, "device"), format_percent) for group in groups],
        "what happened": [group[0].note for group in groups],
    }
    first = next(iter(columns))
    used = {name: cells for name, cells in columns.items() if any(cells) or name in (first, "status")}
    rows = "".join(
        _render_row(group[0], {name: cells[number] for name, cells in used.items()})
        for number, group in enumerate(groups)
    )
    return join_table(f"Ranks of {picture.name}", used, rows)


def join_table(words: str, columns: Iterable[str], rows: str) -> str:
    """Return a table as HTML.

    Args:
        words: what it shows, for who does not see it.
        columns: their names.
        rows: HTML of the rows below these.
    """
    head = "".join(
        f'<th scope="col" style="{CELL};font-weight:600">{html.escape(name)}</th>' for name in columns
    )
    return (
        f'<table style="border-collapse:collapse;margin:4px 0" aria-label="{html.escape(words)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _render_row(state: RankState, texts: dict[str, str]) -> str:
    (_, who), *rest = texts.items()
    cells = [f'<th scope="row" style="{CELL};font-weight:600">{who}</th>']
    for name, text in rest:
        wrong = name in ("status", "what happened") and state.status in BAD
        style = f"{CELL};color:{WRONG}" if wrong else CELL
        style += ";white-space:normal" if name == "what happened" else ""
        more = f' title="{html.escape(state.detail)}"' if state.detail and name == "what happened" else ""
        cells.append(f'<td style="{style}"{more}>{html.escape(text)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


# -- ranks that are alike


def group_alike(ranks: Sequence[RankState]) -> list[tuple[RankState, ...]]:
    """Return the ranks that are in the same state together, and on one node if there are not too many nodes.

    Args:
        ranks: the state of each.
    """
    groups = _group(ranks, by_node=True)
    if len(groups) > MOST_ROWS:
        groups = _group(ranks, by_node=False)
    return groups[:MOST_SINGLE]


def _group(ranks: Sequence[RankState], *, by_node: bool) -> list[tuple[RankState, ...]]:
    """Return the ranks of each state together, or of each node and state; those that failed first."""
    groups: dict[tuple[str, ...], list[RankState]] = {}
    for state in ranks:
        node = state.node if by_node else ""
        groups.setdefault((node, state.status, state.waiting, state.note), []).append(state)
    return sorted(map(tuple, groups.values()), key=lambda group: group[0].status not in BAD)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return numbers with their runs drawn together, such as `0-3, 7`.

    Args:
        ranks: in order.
    """
    pieces: list[list[int]] = []
    for rank in ranks:
        if pieces and rank == pieces[-1][-1] + 1:
            pieces[-1] = [pieces[-1][0], rank]
        else:
            pieces.append([rank])
    return ", ".join("-".join(map(str, piece)) for piece in pieces)


def _describe_nodes(group: Sequence[RankState]) -> str:
    """Return the node of ranks, or of how many nodes they are."""
    nodes = {state.node for state in group}
    return f"{len(nodes)} nodes" if len(nodes) > 1 else group[0].node


def _find_longest(group: Sequence[RankState]) -> RankState:
    """Return the rank that has waited longest."""
    return max(group, key=lambda state: state.waited)


def _list_usage(group: Sequence[RankState], name: str) -> Iterator[float | None]:
    return (getattr(state.usage or Usage(), name) for state in group)


def _span(values: Iterator[float | None] | Sequence[float | None], show: Callable[[float], str]) -> str:
    """Return the smallest and the largest value as text, one where they are shown alike; empty where none is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = show(min(known)), show(max(known))
    return low if low == high else f"{low} to {high}"


# -- words


def describe_rank_status(state: RankState) -> str:
    """Return the status of a rank with its sign, such as `● running`.

    Args:
        state: the rank.
    """
    if state.status == "waiting":
        return (
            f"{SIGNS['waiting']} waiting in {state.waiting} for {format_duration(float(int(state.waited)))}"
        )
    return f"{SIGNS[state.status]} {state.status}"


def format_bytes(count: float) -> str:
    """Return a number of bytes in a unit that leaves few digits.

    Args:
        count: bytes.
    """
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def format_percent(share: float) -> str:
    """Return a share.

    Args:
        share: in percent.
    """
    return f"{share:.0f} %"
