"""Any output, bar, metric and name of a rank: it is shown, and is text on the page."""

from __future__ import annotations

import itertools
import re
import time
from html.parser import HTMLParser
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from notebook_accel.events import Display, Failure, Lines, Metric, Phase, Progress, Pulse, Unfinished
from notebook_accel.stream.lines import LineReader, split_lines
from notebook_accel.stream.record import RunRecord
from notebook_accel.stream.series import Point
from notebook_accel.widgets.run import ansi, chart, lines, page, picture
from notebook_accel.widgets.run.picture import FailureSummary, Output, Picture, RankState
from tests.faults.fuzzing import NUMBERS, ODD_TEXTS, TEXTS, fuzz

PIECES: Final = st.one_of(
    st.sampled_from(
        [
            b"\n",
            b"\r",
            b"\x1b[A",
            b"\x1b[2A",
            b"\x1b[999999999A",
            b"\x1b[" + b"9" * 6_000 + b"A",
            b"\x1b",
            b"\xff",
        ]
    ),
    st.binary(max_size=12),
    st.sampled_from(["ä".encode(), b"one\n", b"\x1b[31mred\x1b[0m"]),
)


@fuzz(500)
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 10_000), max_size=6))
def test_any_bytes_are_lines(pieces: list[bytes], places: list[int]) -> None:
    data = b"".join(pieces)
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    reader = LineReader()
    lines = [line for a, b in itertools.pairwise(edges) for line in reader.feed(data[a:b])]
    assert isinstance(reader.unfinished, str)
    lines += reader.settle() + reader.close()
    assert not any("\n" in line for line in lines) and not reader.has_more
    if b"\x1b" not in data and b"\r" not in data:
        shown = data.removesuffix(b"\n").decode("utf-8", "backslashreplace")
        assert "\n".join(lines) == shown or not data.strip(b"\n"), "all that was written is there"


class _Elements(HTMLParser):
    """Lists the elements of a page with the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(tag, ""), *((tag, name) for name, _ in attrs)}


def list_elements(text: str) -> set[tuple[str, str]]:
    return _Elements(text).found


@fuzz(500)
@given(st.lists(TEXTS | st.sampled_from(["\x1b[", "m", ";", "38;2;", "1", "\x1b[0m"]), max_size=8))
@example(["\x1b[" + "9" * 5_000 + "m<b>"])
def test_any_text_is_text_on_the_page(texts: list[str]) -> None:
    text = "".join(texts)
    assert {name for name, _ in list_elements(ansi.to_html(text))} <= {"span"}
    assert ansi.strip_escapes(text) == ansi.strip_escapes(ansi.strip_escapes(text)) or "\x1b" in text


VALUES = st.one_of(st.floats(), NUMBERS.filter(lambda number: isinstance(number, float)))


@st.composite
def records(draw: st.DrawFn) -> RunRecord:
    """A record of what two ranks said: any words and numbers in any event."""
    record, now = RunRecord(max_bytes=1_000_000), time.time()
    for rank in range(2):
        record.apply(Phase(rank=rank, time=now, name="running"))
        for text in draw(st.lists(TEXTS, max_size=3)):
            record.apply(
                Lines(rank=rank, time=now, stream=draw(st.sampled_from(["stdout", "stderr"])), texts=(text,))
            )
        record.apply(Unfinished(rank=rank, time=now, stream="stdout", text=draw(TEXTS)))
        for number in range(draw(st.integers(0, 2))):
            record.apply(
                Progress(
                    rank=rank,
                    time=now,
                    bar=number,
                    description=draw(TEXTS),
                    count=draw(VALUES),
                    total=draw(st.none() | VALUES),
                    text=draw(TEXTS),
                    finished=draw(st.booleans()),
                    leave=draw(st.booleans()),
                )
            )
        record.apply(
            Pulse(rank=rank, time=now, steps=draw(st.integers(0, 2**70)), batch=1, waiting=draw(TEXTS))
        )
        names = draw(st.dictionaries(TEXTS, VALUES, max_size=3))
        record.apply(Metric(rank=rank, time=now, values=names, step=draw(st.none() | st.integers())))
        kinds = st.sampled_from(["text/plain", "image/png", "image/jpeg", "image/svg+xml", "x"])
        record.apply(Display(rank=rank, time=now, data=draw(st.dictionaries(kinds, TEXTS, max_size=2))))
    record.apply(Failure(rank=1, time=now, pid=7, lost=draw(TEXTS)))
    return record


def draw_picture(record: RunRecord, words: list[str]) -> Picture:
    """Return the picture of a record as `make_picture` does, for a run that is none."""
    shown = (0, 1)
    drawn = picture.group_by_rank(record.progress.values())
    unfinished = picture.group_by_rank(record.unfinished.values())
    return Picture(
        name=words[0],
        status="failed",
        seconds=1.0,
        started=time.time(),
        background=True,
        ranks=tuple(
            RankState(rank=rank, status="waiting", waiting=words[1], waited=1.0, step=3, note=words[2])
            for rank in shown
        ),
        bars={rank: picture._make_bars(record, rank, drawn.get(rank, ()), False) for rank in shown},
        slowest=min(shown, key=lambda rank: picture._measure_progress(record, rank, drawn.get(rank, ()))),
        outputs={rank: picture._make_output(record, rank, unfinished.get(rank, ())) for rank in shown},
        metrics={name: tuple(points) for name, points in record.metrics.items()},
        displays=tuple(record.displays.values()),
        failure=FailureSummary(title=words[3], traceback=words[4], others=(words[5],)),
        notice=words[0],
    )


PLAIN = {
    "div": {"style", "class", "role", "aria-label", "aria-valuetext", "aria-valuenow"},
    "pre": {"style", "role", "aria-label"},
    "span": {"style"},
    "details": {"open"},
    "img": {"alt", "src", "style", "usemap"},
    "map": {"name"},
    "area": {"shape", "coords", "title"},
    "b": {"role", "style"},
    "table": {"style", "aria-label"},
    "th": {"scope", "style"},
    "td": {"style"},
    "summary": {"style"},
    **{name: set() for name in ("thead", "tbody", "tr", "code")},
}
PLAIN["div"] |= {"aria-valuemin", "aria-valuemax"}


@fuzz(200)
@given(records(), st.lists(TEXTS, min_size=6, max_size=6))
def test_words_of_ranks_are_text_on_the_page(record: RunRecord, words: list[str]) -> None:
    drawn = draw_picture(record, words)
    for text in (
        page.render_page(drawn),
        page.render_chart(drawn, log=True),
        page.render_bars(drawn, every_rank=True),
    ):
        for tag, attribute in list_elements(text):
            assert tag in PLAIN or tag in SVG, (tag, attribute)
            assert not attribute or tag in SVG or attribute in PLAIN[tag], (tag, attribute)
            assert not attribute.startswith("on"), (tag, attribute)
    assert isinstance(page.render_text(drawn), str)


SVG = {"svg", "path", "rect", "text", "tspan", "g", "title"}


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg"])
@pytest.mark.parametrize("data", ['"><script>alert(1)</script>', b"\x89PNG", 7, None, "AAAA\n"])
def test_a_figure_is_one_element(kind: str, data: Any) -> None:
    event = Display(rank=0, time=0.0, data={kind: data, "text/plain": '"><b>'})
    assert {name for name, _ in list_elements(page.render_displays([event]))} <= {"div", "img", "pre"}


@fuzz()
@given(
    st.dictionaries(
        TEXTS,
        st.lists(st.tuples(st.none() | st.integers(), VALUES), min_size=1, max_size=6),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_any_numbers_make_a_chart(values: dict[str, list[tuple[int | None, float]]], log: bool) -> None:
    metrics = {
        name: [Point(step, 1.0 + number, value) for number, (step, value) in enumerate(points)]
        for name, points in values.items()
    }
    panels = chart.make_panels(metrics, 0.0, log=log)
    drawn = chart.render_svg(panels, chart.describe_last_values(metrics), log=log)
    places = [
        {step for step, value in points if abs(value) <= 1e300 and (value > 0 or not log)}
        for points in values.values()
    ]
    assert not any(len(steps) > 1 for steps in places) or drawn
    assert isinstance(chart.render_values(metrics, panels) + chart.render_areas(panels), str)
    assert not re.search("nan|inf", "".join(re.findall(r' (?:d|x|y|width|transform)="([^"]*)"', drawn)))


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_are_lines_of_a_rank(text: str) -> None:
    line = Lines(rank=0, time=0.0, stream="stdout", texts=(text,))
    output = Output(total=1, lines=(*split_lines(line),))
    assert list_elements(lines.render_lines(0, output)) <= {
        ("pre", ""),
        ("pre", "role"),
        ("pre", "aria-label"),
        ("pre", "style"),
        ("span", ""),
        ("span", "style"),
    }
