"""Lines of ranks as HTML: which a saved notebook keeps, and how they look."""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, Literal

from notebook_accel.events import Line, Unfinished
from notebook_accel.stream.record import RunRecord

from . import ansi
from .picture import MAX_WIDTH, Output, Picture

Mark = Literal["", "err", "trace"]
"""What a line is: output, standard error, or part of a traceback."""

_WIDTHS: Final = (1 << 20, 20_000, MAX_WIDTH)
"""Characters of a line in a saved notebook: the most with which all lines of the run fit."""
MAX_SAVED: Final = 1_000_000  # bytes of all ranks in a saved notebook
Key = tuple[str, str]
"""Stream and text of a line."""
_MARK_BYTES: Final = 90  # of the element around lines of standard error
_TRACE_START: Final = "Traceback (most recent call last)"
WRONG: Final = "var(--jp-error-color1,#d64550)"
_BORDER: Final = "1px solid var(--jp-border-color2,rgba(127,127,127,0.4))"
PRE: Final = (
    "margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;line-height:1.35;"
    "font-family:var(--jp-code-font-family,monospace);color:inherit;background:transparent"
)
MARKED: Final[Mapping[Mark, str]] = {
    "err": "border-left:3px solid #b8860b;padding-left:5px;display:block",
    "trace": f"border-left:3px solid {WRONG};padding-left:5px;display:block;color:{WRONG}",
}
_ALL: Final = "[all] "


def classify_lines(lines: Iterable[Line | Unfinished], width: int = MAX_WIDTH) -> Iterator[tuple[Mark, str]]:
    """Yield each line as its mark and its text. A traceback is found on both streams.

    Args:
        lines: of one rank, oldest first. Text that was overwritten by a carriage return is dropped.
        width: characters that are shown of a line at most.
    """
    inside = False
    for line in lines:
        text = line.text
        if "\r" in text:  # a terminal shows what was written last
            text = text.rstrip("\r").rpartition("\r")[2]
        if len(text) > width:
            text = f"{text[:width]}… (the rest of the line is left out)"
        if _TRACE_START in text:
            inside = True
        if not inside:
            yield ("err" if line.stream == "stderr" else ""), text
            continue
        yield "trace", text
        bare = ansi.strip_escapes(text)
        if bare and not bare[0].isspace() and _TRACE_START not in bare:
            inside = False


def render_lines(rank: int, output: Output, place: str = "") -> str:
    """Return lines of a rank as HTML, with errors marked.

    Args:
        rank: whose lines.
        output: the lines.
        place: says where all of them are, see `describe_place`; for lines that are left out between the first and the
            last ones.
    """
    parts = [*_render_rows(output.head, output)]
    if output.head:
        lost = f", of which {output.forgotten:,} are lost" if output.forgotten else ""
        gap = f"… {output.hidden:,} lines are left out here{lost}: {place} …"
        parts.append(f'<span style="display:block;opacity:0.7">{html.escape(gap)}</span>')
    parts += _render_rows(output.rows, output)
    return f'<pre role="group" aria-label="Lines of rank {rank}" style="{PRE}">{"".join(parts)}</pre>'


def is_shared(row: Line | Unfinished, shared: Set[Key]) -> bool:
    """Return whether all ranks have written a line.

    Args:
        row: the line.
        shared: what all have written.
    """
    return isinstance(row, Line) and _get_key(row) in shared


def _render_rows(rows: Sequence[Line | Unfinished], output: Output) -> Iterator[str]:
    marked = [
        (mark, f"{_ALL}{text}" if is_shared(row, output.shared) else text)
        for row, (mark, text) in zip(rows, classify_lines(rows, output.width), strict=True)
    ]
    for mark, group in itertools.groupby(marked, key=lambda pair: pair[0]):
        text = ansi.to_html("\n".join(text for _, text in group))
        yield f'<span style="{MARKED[mark]}">{text}</span>' if mark else f"{text}\n"


def has_errors(output: Output) -> bool:
    """Return whether the newest lines have a traceback.

    Args:
        output: of one rank.
    """
    return any(_TRACE_START in line.text for line in output.lines)


def describe_place(rank: int | str, log_dir: str, number: int) -> str:
    """Return a clause that says where all lines of a rank are.

    Args:
        rank: whose lines; a word that stands for several ranks.
        log_dir: the folder with the files of the run; empty without one.
        number: the number of the run; 0 if `runs()` does not list it.
    """
    if log_dir:
        return f"{log_dir}/rank_{rank}.log has all"
    files = "log_dir= keeps all in files"
    if not number:
        return files
    return (
        f"notebook_accel.runs().find({number}).lines({rank}) has all while this kernel keeps the run; {files}"
    )


def describe_hidden_lines(rank: int, output: Output, log_dir: str = "", number: int = 0) -> str:
    """Return how many older lines are not shown, and where they are; empty if there are none.

    Args:
        rank: whose lines.
        output: the lines.
        log_dir: the folder with the files of the run; empty without one.
        number: the number of the run; 0 if `runs()` does not list it.
    """
    if output.head or not output.hidden:
        return ""
    if output.forgotten and not log_dir:
        lost = min(output.hidden, output.forgotten)
        return f"{output.hidden:,} earlier lines, of which {lost:,} are lost: log_dir= keeps all in files"
    return f"{output.hidden:,} earlier lines: {describe_place(rank, log_dir, number)}"


def render_box(
    rank: int, output: Output, *, is_open: bool, status: str = "", log_dir: str = "", number: int = 0
) -> str:
    """Return the lines of a rank as an element that folds, scrolled to its end.

    Args:
        rank: whose lines.
        output: the lines.
        is_open: whether it is open at first.
        status: what the title says of the rank, such as `✗ failed`.
        log_dir: the folder with the files of the run; empty without one.
        number: the number of the run; 0 if `runs()` does not list it.
    """
    who = f"rank {rank} {status}".rstrip()
    title = f"Output of {who}: {output.total:,} line{'' if output.total == 1 else 's'}"
    if output.alike:
        title += f", {output.alike:,} of them by all ranks and shown with the first rank"
    if not (output.rows or output.head):
        return f"<div>{title}</div>" if output.total else ""
    note = describe_hidden_lines(rank, output, log_dir, number)
    place = describe_place(rank, log_dir, 0 if output.forgotten else number)
    notes = [note] * bool(note) + [f"long lines are cut: {place}"] * output.is_cut
    left_out = "".join(f'<div style="opacity:0.8">{html.escape(each)}</div>' for each in notes)
    shown = render_lines(rank, output, place)
    box = (
        f'<div style="border:{_BORDER};padding:4px 8px;max-height:24em;overflow:auto;display:flex;'
        f'flex-direction:column-reverse"><div style="flex-shrink:0">{shown}</div></div>'
    )
    return render_fold(title, left_out + box, is_open=is_open)


def render_fold(title: str, content: str, *, is_open: bool = False) -> str:
    """Return a part of a page that opens by a click on its title, as HTML.

    Args:
        title: as HTML.
        content: as HTML.
        is_open: whether it is open at first.
    """
    # the classic notebook would leave out the sign that there is something to open
    head = f'<summary style="display:list-item">{title}</summary>'
    return f"<details{' open' if is_open else ''}>{head}{content}</details>"


# -- what a saved notebook keeps


def keep_all(shown: Picture, record: RunRecord, most: int = MAX_SAVED) -> Picture:
    """Return the picture of a run that is over with all of its lines, up to a size.

    What all ranks have written alike stays with the first one alone. Where a rank has written too much, its first and
    its last lines are kept.

    Args:
        shown: the run.
        record: has the lines.
        most: number of bytes of all ranks.
    """
    kept = record.find_lines()
    found = {
        rank: _put_together(output, record.find_head(rank), kept.get(rank, ()))
        for rank, output in shown.outputs.items()
    }
    every = {rank: [*head, *tail] for rank, (head, tail) in found.items()}
    shared = _find_shared(list(every.values()) if len(every) == len(shown.ranks) else [])
    first = min((rank for rank, lines in every.items() if lines), default=0)
    own = {
        rank: (head, tail) if rank == first else (_leave_out(shared, head), _leave_out(shared, tail))
        for rank, (head, tail) in found.items()
    }
    for width in _WIDTHS:
        sizes = {rank: (_measure(head, width), _measure(tail, width)) for rank, (head, tail) in own.items()}
        if sum(map(sum, itertools.chain.from_iterable(sizes.values()))) <= most:
            break
    rooms = _divide({rank: sum(map(sum, each)) for rank, each in sizes.items()}, most)
    outputs = {}
    for rank, output in shown.outputs.items():
        head, tail = _fit(*own[rank], *sizes[rank], rooms[rank])
        outputs[rank] = replace(
            output,
            head=tuple(head),
            lines=tuple(tail),
            alike=len(every[rank]) - sum(map(len, own[rank])),
            forgotten=max(0, output.total - len(every[rank])),
            shared=shared if rank == first else frozenset(),
            width=width,
        )
    return replace(shown, outputs=outputs)


def _put_together(
    output: Output, head: Sequence[Line], newest: Sequence[Line]
) -> tuple[Sequence[Line], Sequence[Line]]:
    """Return the first lines of a rank, and all others that are known; of all lines none are first ones.

    A record forgets the oldest lines of all ranks, and has the first and the newest ones of each rank besides.
    """
    tail = max(newest, output.lines, key=len)  # the second may be cut
    between = output.total - len(head) - len(tail)
    if len(tail) >= output.total or between <= 0:
        return [], [*head[: max(0, output.total - len(tail))], *tail]
    return head, tail


def _leave_out(shared: Set[Key], lines: Sequence[Line]) -> Sequence[Line]:
    return [line for line in lines if _get_key(line) not in shared] if shared else lines


def _get_key(line: Line) -> Key:
    return line.stream, line.text


def _measure(lines: Sequence[Line], width: int) -> list[int]:
    """Return the size of each line in a page, in bytes, where so many characters of it are shown."""
    sizes, before = [], ""
    for line in lines:
        text = html.escape(line.text[:width]).encode(errors="replace")
        sizes.append(len(text) + 1 + (_MARK_BYTES if line.stream == "stderr" != before else 0))
        before = line.stream
    return sizes


def _find_shared(ranks: Sequence[Sequence[Line]]) -> frozenset[Key]:
    """Return the lines that every rank has written equally often. Those of tracebacks stay together, and are none."""
    if len(ranks) < 2:
        return frozenset()
    counts: list[Counter[Key]] = []
    traces: set[Key] = set()
    for lines in ranks:
        count: Counter[Key] = Counter()
        for line, (mark, _) in zip(lines, classify_lines(lines), strict=True):
            if mark == "trace":
                traces.add(_get_key(line))
            elif line.text.strip():
                count[_get_key(line)] += 1
        counts.append(count)
    rest = counts[1:]
    return frozenset(
        key
        for key, number in counts[0].items()
        if key not in traces and all(count[key] == number for count in rest)
    )


def _divide(sizes: Mapping[int, int], most: int) -> dict[int, int]:
    """Return the room of each rank: what small ones leave is for the others."""
    rooms, left = {}, most
    for number, rank in enumerate(sorted(sizes, key=lambda rank: sizes[rank])):
        rooms[rank] = min(sizes[rank], left // (len(sizes) - number))
        left -= rooms[rank]
    return rooms


def _fit(
    head: Sequence[Line],
    tail: Sequence[Line],
    head_sizes: Sequence[int],
    tail_sizes: Sequence[int],
    room: int,
) -> tuple[Sequence[Line], Sequence[Line]]:
    """Return the first and the last lines that there is room for; all of them are last ones where they fit."""
    if sum(head_sizes) + sum(tail_sizes) <= room:
        return head, tail
    if not head:
        head, head_sizes = tail, tail_sizes
    first = _take(head_sizes, room // 2)
    last = _take(tail_sizes[::-1], room - sum(head_sizes[:first]))
    return head[:first], tail[len(tail) - last :]


def _take(sizes: Sequence[int], room: int) -> int:
    """Return how many lines fit, from the first on."""
    return sum(1 for _ in itertools.takewhile(lambda size: size <= room, itertools.accumulate(sizes)))
