"""Renders a picture of a run: parts of HTML for the live view, a static page without scripts, and plain text."""

from __future__ import annotations

import base64
import html
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from notebook_accel.events import Display
from notebook_accel.launch.durations import format_duration
from notebook_accel.stream.series import Point

from . import ansi, chart, ranks
from .lines import MARKED, PRE, WRONG, classify_lines, describe_place, is_shared, render_box, render_fold
from .picture import BAD, Bar, FailureSummary, Picture, sort_ranks
from .table import (
    MOST_ROWS,
    MOST_SINGLE,
    SIGNS,
    describe_rank_status,
    describe_ranks,
    format_bytes,
    group_alike,
    render_table,
)

_PLAIN_LINES: Final = 200  # of all ranks
_LEAST_LINES: Final = 20  # of each
_LOG_RATIO: Final = (
    50.0  # a metric whose largest value is more than this times its smallest has a logarithmic chart
)
PICTURE_TEXT: Final = "#333333"
PICTURE_GROUND: Final = "#ffffff"
"""A picture knows nothing of the notebook's theme, and no text can be read well on a white and on a dark one."""


# -- parts


def describe_status(picture: Picture) -> str:
    """Return the status of the run with its sign, such as `● running`.

    Args:
        picture: the run.
    """
    word = "stopping" if picture.stopping else picture.status
    return f"{SIGNS[picture.status]} {word}"


def render_headline(picture: Picture) -> str:
    """Return the name of the run, its number of processes and its time, as HTML.

    Args:
        picture: the run.
    """
    return f"<b>{html.escape(picture.name)}</b>{_describe_processes(picture)}, {_describe_time(picture)}"


def _describe_processes(picture: Picture) -> str:
    count = len(picture.ranks)
    return f" on {count} process{'' if count == 1 else 'es'}" if picture.distributed else ""


def _describe_time(picture: Picture) -> str:
    """Return how long the run has lasted, and how many times it was started again."""
    time = format_duration(picture.seconds if picture.is_over else float(int(picture.seconds)))
    again = (
        "" if not picture.restarts else f", restarted {picture.restarts} times".replace(" 1 times", " once")
    )
    return f"{'after' if picture.is_over else 'for'} {time}{again}"


def render_bars(picture: Picture, *, every_rank: bool = False) -> str:
    """Return progress bars as HTML.

    Args:
        picture: the run.
        every_rank: whether to draw the bars of all ranks, or only those of the slowest rank.

    Returns:
        HTML; empty if no rank has a bar.
    """
    if not picture.bars:
        return ""
    drawn = list(picture.bars) if every_rank or picture.slowest is None else [picture.slowest]
    rows = []
    for rank in drawn:
        who = f"rank {rank}" if len(picture.bars) > 1 else ""
        who += " (slowest)" if who and rank == picture.slowest and not picture.is_over else ""
        rows += [_render_bar(who, bar) for bar in picture.bars[rank]]
    return f'<div style="margin:4px 0">{"".join(rows)}</div>'


def _render_bar(who: str, bar: Bar) -> str:
    label = " ".join(word for word in (who, bar.label) if word)
    percent = None if bar.fraction is None else 100 * bar.fraction
    known = "" if percent is None else f' aria-valuenow="{percent:.0f}" aria-valuemin="0" aria-valuemax="100"'
    width = 100.0 if percent is None else percent
    shade = "opacity:0.35;" if percent is None else ""
    return (
        '<div style="display:flex;align-items:center;gap:10px;margin:2px 0">'
        '<span style="flex:0 0 15em;overflow:hidden;text-overflow:ellipsis;white-space:nowrap">'
        f"{html.escape(label)}</span>"
        f'<div role="progressbar" aria-label="{html.escape(label or "progress")}" '
        f'aria-valuetext="{html.escape(bar.text)}"{known} '
        'style="flex:1 1 auto;max-width:22em;height:10px;border-radius:3px;overflow:hidden;'
        'background:rgba(127,127,127,0.25)">'
        f'<div style="{shade}width:{width:.1f}%;height:100%;'
        'background:var(--jp-brand-color1,#2a7fd4)"></div></div>'
        f"<span>{html.escape(bar.text)}</span></div>"
    )


def render_chart(picture: Picture, *, log: bool = False) -> str:
    """Return the charts of the metrics, and the last values of those that have no chart, as HTML.

    Where ranks are laid over each other, a chart has a line for each of them.

    Args:
        picture: the run.
        log: whether the y axes are logarithmic.

    Returns:
        HTML; empty without a metric.
    """
    words = chart.describe_last_values(picture.metrics)
    if panels := ranks.make_panels(picture, log=log):
        drawn = ranks.render_legend(picture) + chart.render_svg(panels, f"each rank, {words}", log=log)
    else:
        panels = chart.make_panels(picture.metrics, picture.started, log=log)
        drawn = chart.render_svg(panels, words, log=log)
    return drawn + chart.render_values(picture.metrics, panels)


def render_usage(picture: Picture) -> str:
    """Return charts of what the ranks have used so far as HTML; empty where that is not known.

    Args:
        picture: the run.
    """
    return chart.render_svg(_list_usage(picture), "memory and load of the ranks")


def _list_usage(picture: Picture) -> list[chart.Panel]:
    lines = {name: chart.Compared(points, picture.started) for name, points in picture.history.items()}
    return chart.compare_panels(lines, limit=ranks.POINTS)


# -- notices


def render_failure(failure: FailureSummary) -> str:
    """Return the first failure as HTML: its title, its traceback, and a line for each other rank.

    Args:
        failure: the first failure.
    """
    parts = [f'<div role="alert" style="color:{WRONG};font-weight:600">{html.escape(failure.title)}</div>']
    if failure.traceback:
        parts.append(f'<pre style="{PRE};margin:4px 0">{ansi.to_html(failure.traceback)}</pre>')
    parts += [f"<div>{html.escape(line)}</div>" for line in failure.others]
    return "".join(parts)


def render_notice(picture: Picture) -> str:
    """Return the last message of the launcher itself as HTML; empty without one.

    Args:
        picture: the run.
    """
    if not picture.notice:
        return ""
    return f'<pre role="note" style="{PRE};{MARKED["err"]};margin:4px 0">{html.escape(picture.notice)}</pre>'


# -- displays


def render_displays(displays: Sequence[Display], *, names_ranks: bool = False) -> str:
    """Return figures and other displays of the ranks as HTML. A display that needs scripts becomes its plain text.

    Args:
        displays: oldest first.
        names_ranks: whether to say above each whose it is.
    """
    return "".join(
        (render_title(f"rank {event.rank}") if names_ranks else "") + _render_display(event)
        for event in displays
    )


def render_title(title: str) -> str:
    """Return what stands above a display, as HTML.

    Args:
        title: such as `rank 1`.
    """
    return f'<div style="opacity:0.8">{html.escape(title)}</div>'


def _render_display(event: Display) -> str:
    data: Mapping[str, Any] = event.data
    for kind in ("image/png", "image/jpeg"):
        if isinstance(image := data.get(kind), (str, bytes)):
            source = html.escape(image if isinstance(image, str) else base64.b64encode(image).decode())
            text = html.escape(str(data.get("text/plain", "figure")))
            return f'<div><img alt="{text}" src="data:{kind};base64,{source.strip()}" style="max-width:100%"></div>'
    if "image/svg+xml" in data:
        return f"<div>{_embed_svg(str(data['image/svg+xml']), 'figure')}</div>"
    if "text/html" in data and "<script" not in str(data["text/html"]).lower():
        return f"<div>{data['text/html']}</div>"
    return f'<pre style="{PRE}">{ansi.to_html(str(data.get("text/plain", "")))}</pre>'


def _embed_svg(svg: str, text: str, areas: str = "") -> str:
    """Return an `img` element that holds an SVG. Jupyter removes plain SVG from notebooks that are not trusted."""
    data = svg.encode(errors="backslashreplace")  # file names may have surrogates
    source = base64.b64encode(data).decode()
    name = f"accel-{zlib.crc32(data):08x}"
    used, named = (f' usemap="#{name}"', f'<map name="{name}">{areas}</map>') if areas else ("", "")
    return (
        f'<img alt="{html.escape(text)}" src="data:image/svg+xml;base64,{source}"{used} style="max-width:100%">'
        f"{named}"
    )


# -- the whole picture


def render_page(picture: Picture) -> str:
    """Return the whole picture as HTML that needs no script, no style sheet and no kernel.

    Args:
        picture: the run, usually at its end.
    """
    wrong = picture.status == "failed"
    style = f' style="color:{WRONG}"' if wrong else ""
    parts = [f'<div><b role="status"{style}>{describe_status(picture)}</b> {render_headline(picture)}</div>']
    if picture.failure is not None:
        parts.append(render_failure(picture.failure))
    if picture.distributed or picture.status == "failed":
        parts.append(render_table(picture))
        if MOST_ROWS < len(picture.ranks) <= MOST_SINGLE:
            table = render_table(picture, every_rank=True)
            parts.append(render_fold("all ranks", table))
    parts.append(render_notice(picture))
    parts.append(render_bars(picture))
    parts.append(_render_static_chart(picture))
    if laid := _render_laid(picture):
        parts.append(render_fold("metrics of each rank", laid))
    if used := embed_chart(_list_usage(picture), "memory and load of the ranks"):
        parts.append(render_fold("memory and load", used))
    if picture.background:
        parts.append(render_displays(picture.displays, names_ranks=len(picture.ranks) > 1))
    parts += _render_boxes(picture)
    parts.append(render_hidden_outputs(picture))
    return f'<div class="accel-run accel-run-static" style="line-height:1.4;max-width:64em">{"".join(parts)}</div>'


def _render_boxes(picture: Picture) -> Iterator[str]:
    """Yield the lines of each rank. Those that are read first are open: of the first failure, and of the first rank."""
    shown = [rank for rank in sort_ranks(picture) if picture.outputs[rank].rows]
    for rank in sort_ranks(picture):
        status = picture.find_status(rank)
        yield render_box(
            rank,
            picture.outputs[rank],
            is_open=rank in (*shown[:1], min(shown, default=rank)),
            status=f"{SIGNS[status]} {status}" if status in BAD else "",
            log_dir=picture.log_dir,
            number=picture.number,
        )


def _render_static_chart(picture: Picture) -> str:
    panels = chart.make_panels(picture.metrics, picture.started)
    words = chart.describe_last_values(picture.metrics)
    shown = embed_chart(panels, words) + chart.render_values(picture.metrics, panels)
    steep = find_steep(picture.metrics)
    if panels := chart.make_panels(steep, picture.started, log=True):
        logarithmic = embed_chart(panels, chart.describe_last_values(steep), log=True)
        shown += render_fold("logarithmic", logarithmic)
    return shown


def _render_laid(picture: Picture) -> str:
    """Return charts with a line for each rank; empty where all have logged the same."""
    if len(picture.rank_metrics) < 2 or ranks.are_alike(picture.rank_metrics):
        return ""
    drawn = embed_chart(ranks.make_panels(picture), "metrics of each rank")
    return drawn and f"{ranks.render_legend(picture)}{drawn}"


def find_steep(metrics: Mapping[str, Sequence[Point]]) -> dict[str, Sequence[Point]]:
    """Return the metrics whose values a logarithmic chart shows better.

    Args:
        metrics: the points of each, oldest first.
    """
    return {name: points for name, points in metrics.items() if _is_steep(points)}


def _is_steep(points: Sequence[Point]) -> bool:
    values = [point.value for point in points if point.value > 0]
    return bool(values) and max(values) / min(values) > _LOG_RATIO


def embed_chart(panels: Sequence[chart.Panel], words: str, *, log: bool = False) -> str:
    """Return charts as an image that a notebook without trust and without scripts shows; empty without a panel.

    Args:
        panels: what to draw.
        words: see `chart.render_svg`.
        log: whether the y axes are logarithmic.
    """
    if not (drawn := chart.render_svg(panels, words, log=log)):
        return ""
    drawn = drawn.replace("var(--jp-ui-font-color1,currentColor)", PICTURE_TEXT)
    head, mark, rest = drawn.partition(">")
    drawn = f'{head}{mark}<rect width="100%" height="100%" fill="{PICTURE_GROUND}"/>{rest}'
    image = _embed_svg(drawn, words, chart.render_areas(panels))
    card = f"display:inline-block;max-width:100%;padding:6px;border-radius:4px;background:{PICTURE_GROUND}"
    return f'<div style="{card}">{image}</div>'


def render_text(picture: Picture, last: int | None = None) -> str:
    """Return the picture as plain text: status, ranks, metrics, the last lines of each rank, the failure.

    Args:
        picture: the run.
        last: number of lines to show of each rank; 0 shows none. By default 200 of all ranks, and 20 of each at least.
    """
    if last is None:
        last = max(_LEAST_LINES, _PLAIN_LINES // max(1, len(picture.outputs)))
    word = "stopping" if picture.stopping else picture.status
    parts = [f"{picture.name}{_describe_processes(picture)}: {word} {_describe_time(picture)}"]
    is_large = len(picture.ranks) > MOST_SINGLE
    groups = group_alike(picture.ranks) if is_large else [(state,) for state in picture.ranks]
    for group in groups if picture.distributed else ():
        state = group[0]
        if len(group) > 1:
            ranks = describe_ranks([one.rank for one in group])
            parts.append(f"ranks {ranks}: {describe_rank_status(state)[2:]}")
            continue
        words = [f"rank {state.rank}: {describe_rank_status(state)[2:]}"]
        words += [f"step {state.step:,}"] if state.step is not None else []
        words += [f"{state.rate:.3g} steps/s"] if state.rate is not None else []
        words += [f"memory {format_bytes(state.usage.memory)}"] if state.usage and state.usage.memory else []
        words += [state.note] if state.note else []
        parts.append(", ".join(words))
    parts += [picture.notice] if picture.notice else []
    if picture.metrics:
        parts.append(chart.describe_last_values(picture.metrics))
    prefixed = len(picture.outputs) > 1
    for rank, output in picture.outputs.items():
        rows = output.rows
        shown = list(zip(rows, classify_lines(rows), strict=True))[-last:] if last else []
        if shown and (left := output.total - output.alike - len(shown)) > 0:
            place = describe_place(rank, picture.log_dir, 0 if output.forgotten else picture.number)
            parts.append(f"{f'[{rank}] ' if prefixed else ''}… {left:,} earlier lines: {place}")
        for row, (_, text) in shown:
            who = "all" if is_shared(row, output.shared) else rank
            parts.append(f"[{who}] {ansi.strip_escapes(text)}" if prefixed else ansi.strip_escapes(text))
    if picture.failure is not None:
        parts.append(ansi.strip_escapes(picture.failure.traceback) or picture.failure.title)
        parts += picture.failure.others
    return "\n".join(parts)


def render_hidden_outputs(picture: Picture) -> str:
    """Return of how many ranks the lines are left out, and where they are, as HTML; empty where none are.

    Args:
        picture: the run.
    """
    if not picture.hidden_outputs:
        return ""
    ranks = "1 more rank" if picture.hidden_outputs == 1 else f"{picture.hidden_outputs:,} more ranks"
    place = describe_place("*" if picture.log_dir else "rank", picture.log_dir, picture.number)
    return f'<div style="opacity:0.8">lines of {ranks}: {html.escape(place)}</div>'


def make_bundle(picture: Picture) -> dict[str, str]:
    """Return the static page and the plain text as a MIME bundle.

    Args:
        picture: the run.
    """
    return {"text/html": render_page(picture), "text/plain": render_text(picture)}
