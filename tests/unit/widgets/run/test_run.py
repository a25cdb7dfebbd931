"""What the view of a run shows: pictures, charts, HTML and text, without a kernel."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tqdm import std

from notebook_accel import notebook_launcher, print_metrics
from notebook_accel.config.launch_options import View
from notebook_accel.events import (
    ClearOutput,
    Display,
    Event,
    Failure,
    Lines,
    Metric,
    Phase,
    Progress,
    Pulse,
    RaisedError,
    Result,
    Unfinished,
)
from notebook_accel.launch.engines.base import Deliver, Engine, Outcome
from notebook_accel.launch.job import Job
from notebook_accel.launch.run import Run
from notebook_accel.launch.supervise.control import Control
from notebook_accel.stream import bars
from notebook_accel.stream.lines import split_lines
from notebook_accel.stream.record import MAX_TAIL, RunRecord
from notebook_accel.widgets.run import lines, page, resolve_view, table
from notebook_accel.widgets.run.picture import (
    Output,
    Picture,
    Usage,
    _measure_progress,
    group_by_rank,
    make_picture,
)
from tests.structure.source import ROOT
from tests.unit.clock import Clock
from tests.unit.jobs import make_job


class Told(Engine):
    """Tells events, and ends."""

    def __init__(self, events: Sequence[Event], outcome: Outcome) -> None:
        self.events, self.outcome = events, outcome

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        deliver(self.events)
        return self.outcome


def nothing() -> None:
    """The function of the runs here."""


def told(*events: Event, outcome: Outcome | None = None, ranks: int = 2, **options: Any) -> Run:
    """Return a run that has told these events; it has ended where there is an outcome."""
    run = Run(make_job(nothing, ranks, **options), Told(events, outcome or Outcome()))
    if outcome is None:
        for event in events:
            run.record.apply(event)
    else:
        run.execute()
    return run


def running(rank: int) -> Phase:
    return Phase(rank=rank, time=time.time() - 10.0, name="running", pid=100 + rank)


def line(text: str, rank: int = 0, stream: Any = "stdout") -> Lines:
    return Lines(rank=rank, time=time.time(), stream=stream, texts=(text,))


def statuses(shown: Picture) -> list[str]:
    return [state.status for state in shown.ranks]


# -- pictures


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """When pictures are made, by both clocks."""
    clock = Clock()
    monkeypatch.setattr("notebook_accel.widgets.run.picture.time", clock)
    return clock.now


def test_ranks_stand_as_they_told(now: float) -> None:
    shown = make_picture(
        told(
            running(1),
            running(2),
            Pulse(rank=2, time=now - 5, steps=7, waiting="all_reduce"),
            running(3),
            Pulse(rank=3, time=now - 0.1, steps=9, waiting="all_reduce"),
            Result(rank=4, time=now, value=b""),
            Failure(rank=5, time=now, pid=9, exitcode=-9),
            ranks=6,
        )
    )
    assert statuses(shown) == ["starting", "running", "waiting", "running", "done", "killed"]
    assert shown.ranks[2].waiting == "all_reduce" and shown.ranks[2].waited == pytest.approx(5, abs=0.5)
    assert [state.step for state in shown.ranks] == [None, None, 7, 9, None, None]
    assert shown.status == "running" and not shown.is_over
    assert "SIGKILL" in shown.ranks[5].note and "rank 5" not in shown.ranks[5].note


def test_a_clock_that_jumped_changes_neither_waits_nor_rates(now: float) -> None:
    pulses = [
        Pulse(rank=0, time=now + (-1) ** second * 9e6, moment=now - 6 + second, steps=2 * second)
        for second in range(4)
    ]
    waiting = Pulse(rank=1, time=now - 9e6, moment=now - 5, steps=7, waiting="all_reduce")
    shown = make_picture(told(running(0), *pulses, running(1), waiting, ranks=2))
    assert shown.ranks[0].rate == pytest.approx(2)
    assert shown.ranks[1].waited == pytest.approx(5, abs=0.5)


def test_the_rate_is_that_of_late_and_at_the_end_that_of_all() -> None:
    now = time.time()
    begun = replace(running(0), time=now - 100)
    pulses = [Pulse(rank=0, time=now - 100 + second, steps=second * second) for second in range(101)]
    shown = make_picture(told(begun, *pulses, ranks=1, background=True))
    assert shown.ranks[0].rate == pytest.approx((100**2 - 81**2) / 19)
    done = Result(rank=0, time=now, value=b"")
    ended = make_picture(
        told(begun, *pulses, done, ranks=1, background=True, outcome=Outcome(values={0: None}))
    )
    assert ended.ranks[0].rate == pytest.approx(100, rel=0.01)
    assert statuses(ended) == ["done"]


def raised(rank: int, **options: Any) -> Failure:
    error = RaisedError(type_name="ValueError", message="bad <b>", pickled=None, frames=())
    return Failure(rank=rank, time=time.time(), pid=7, error=error, **options)


def test_a_rank_that_lost_the_first_one_says_so_and_keeps_what_gloo_said() -> None:
    def fail(rank: int, text: str) -> Failure:
        error = RaisedError(type_name="RuntimeError", message=text, pickled=None, frames=())
        return Failure(rank=rank, time=1.0 + rank, pid=rank, exitcode=None, error=error)

    gloo = "[gloo/pair.cc] Connection closed by peer <1>"
    found = make_picture(told(fail(0, "bad batch"), fail(1, gloo)))
    assert [state.note for state in found.ranks] == [
        "raised RuntimeError: bad batch",
        "lost rank 0, which had failed",
    ]
    drawn = table.render_table(found)
    assert f'title="RuntimeError: {gloo.replace("<1>", "&lt;1&gt;")}">lost rank 0, which had failed<' in drawn
    assert drawn.count("title=") == 1


def test_a_failed_run_shows_its_traceback_once() -> None:
    outcome = Outcome(failures=(raised(1),), stopped=frozenset({0}))
    behind = make_picture(told(running(0), running(1), raised(1), outcome=outcome, background=True))
    assert statuses(behind) == ["stopped", "failed"] and behind.status == "failed"
    assert behind.failure is not None
    whole = "\n".join([behind.failure.traceback, *behind.failure.others])
    assert whole.count("bad <b>") == 1 and whole.count("rank 0 was stopped by the launcher") == 1
    in_cell = make_picture(told(running(0), running(1), raised(1), outcome=outcome))
    assert in_cell.failure is not None and not in_cell.failure.traceback, "the cell shows it"
    assert in_cell.failure.title == "WorkerError: ValueError: bad <b>"


def test_a_stopped_run_has_no_failure() -> None:
    run = told(running(0), running(1))
    run.request_stop()
    assert make_picture(run).stopping
    stopped = told(outcome=Outcome(was_stopped=True, stopped=frozenset({0, 1})), background=True)
    shown = make_picture(stopped)
    assert shown.failure is None and statuses(shown) == ["stopped", "stopped"]


def test_bars_of_the_loader_and_of_tqdm() -> None:
    now = time.time()
    bar = Progress(
        rank=1,
        time=now,
        bar=0,
        description="train",
        count=3,
        total=4,
        text="train:  75%|███ | 3/4 [00:01<00:00]",
    )
    shown = make_picture(
        told(
            running(0),
            running(1),
            Pulse(rank=0, time=now, steps=40, epoch=1, batch=5, batches=20),
            Pulse(rank=1, time=now, steps=39, epoch=1, batch=4),
            bar,
            replace(bar, bar=1, finished=True, leave=False),
        )
    )
    assert [(b.label, b.text, b.fraction) for b in shown.bars[0]] == [("epoch 2", "batch 5 of 20", 0.25)]
    assert [(b.label, b.text, b.fraction) for b in shown.bars[1]] == [
        ("epoch 2", "batch 4", None),
        ("train", "3/4 [00:01<00:00]", 0.75),
    ]
    assert shown.slowest == 1
    assert "rank 1 (slowest) train" in page.render_bars(shown) and "rank 0" not in page.render_bars(shown)
    assert "rank 0" in page.render_bars(shown, every_rank=True)


def test_old_bars_are_forgotten_and_still_count() -> None:
    bar = Progress(rank=0, time=1.0, bar=0, description="all", count=1, total=9, text="all: 1/9")
    done = replace(bar, description="one", count=2, finished=True, leave=False)
    many = [replace(done, bar=number) for number in range(1, 3001)]
    behind = [replace(done, rank=1, bar=number) for number in range(10)]
    run = told(running(0), running(1), bar, *many, *behind)
    assert len(run.record.progress) <= 1000
    shown = make_picture(run)
    assert [b.label for b in shown.bars[0]] == ["all"]
    drawn = group_by_rank(run.record.progress.values())
    counts = [_measure_progress(run.record, rank, drawn[rank])[3] for rank in range(2)]
    assert counts == [1 + 2 * 3000, 2 * 10]


class Sent:
    """Takes a worker's events; stands for the socket to the notebook."""

    rank, usable = 0, True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def now(self) -> float:
        return time.time()


def count_nested(
    kind: Any, levels: int, leave: bool, steps: list[Picture], look: Callable[[], Picture]
) -> None:
    for _ in kind(range(2), leave=leave, mininterval=0):
        if levels > 1:
            count_nested(kind, levels - 1, leave, steps, look)
        else:
            steps.append(look())


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("levels", [2, 3])
def test_nested_bars_without_names_are_all_shown(levels: int, leave: bool) -> None:
    class Bar(std.tqdm):  # type: ignore[type-arg]
        """A class of its own, so that tqdm stays as it is for other tests."""

    ranks = [Sent(), Sent()]
    ranks[1].rank = 1
    steps: list[list[Picture]] = [[], []]
    for rank, sent in enumerate(ranks):
        bars._BarHook(sent).install(Bar)  # type: ignore[arg-type]
        run = told(running(0), running(1))

        def look(sent: Sent = sent, run: Run = run) -> Picture:
            for event in sent.events:
                run.record.apply(event)
            sent.events.clear()
            return make_picture(run)

        count_nested(Bar, levels, leave, steps[rank], look)
        for picture in steps[rank]:
            shown = picture.bars[rank]
            assert len(shown) == levels and all("/2" in one.text for one in shown)
        fractions = [[one.fraction for one in picture.bars[rank]] for picture in steps[rank]]
        assert fractions == sorted(fractions), "the outermost bar is the first"
        at_end = look().bars.get(rank, ())
        assert [one.fraction for one in at_end] == ([1.0] * levels if leave else [])


def test_what_is_unfinished_is_the_last_row() -> None:
    waiting = Unfinished(rank=0, time=time.time(), stream="stdout", text="name? ")
    run = told(running(0), running(1), line("before"), waiting, ranks=2)
    output = make_picture(run).outputs[0]
    assert output.total == 1 and [row.text for row in output.rows] == ["before", "name? "]
    assert "before\nname? \n" in lines.render_lines(0, output)
    run.record.apply(line("name? Ann"))
    assert [row.text for row in make_picture(run).outputs[0].rows] == ["before", "name? Ann"]
    for text in ("x" * 100_000, "  "):
        run.record.apply(replace(waiting, text=text))
    assert len(run.lines()) == 2 and not make_picture(run).outputs[0].unfinished


def test_output_says_which_ranks_have_lines() -> None:
    events = [running(0), running(1), line("a", 0), line("b", 1)]
    assert {rank: len(o.lines) for rank, o in make_picture(told(*events)).outputs.items()} == {0: 1, 1: 1}
    assert list(make_picture(told(*events, output="first")).outputs) == [0]
    assert list(make_picture(told(*events, output=[1])).outputs) == [1]
    assert not make_picture(told(*events, output="none")).outputs


def test_only_the_newest_lines_are_kept_for_it() -> None:
    run = told(*(line(f"line {number}") for number in range(1000)))
    output = make_picture(run).outputs[0]
    assert (output.total, len(output.lines), output.lines[-1].text) == (1000, MAX_TAIL, "line 999")
    assert lines.describe_hidden_lines(0, output) == "800 earlier lines: log_dir= keeps all in files"
    assert lines.describe_hidden_lines(0, output, number=3).startswith(
        "800 earlier lines: notebook_accel.runs().find(3).lines(0) has all"
    )


def test_plain_text_says_how_many_lines_it_leaves_out() -> None:
    run = told(*(line(f"line {number}") for number in range(1000)))
    text = page.render_text(make_picture(run))
    assert "… 900 earlier lines: log_dir= keeps all in files\n[0] line 900\n" in text and text.endswith(
        "line 999"
    )


def test_displays_are_updated_cleared_and_few() -> None:
    first = Display(rank=0, time=0.0, data={"text/plain": "old"}, transient={"display_id": "a"})
    second = replace(first, data={"text/plain": "new"}, update=True)
    other = Display(rank=1, time=0.0, data={"text/plain": "other"})
    shown = make_picture(told(first, other, second)).displays
    assert [event.data["text/plain"] for event in shown] == ["new", "other"]
    assert [
        e.data["text/plain"] for e in make_picture(told(first, other, ClearOutput(rank=0, time=0.0))).displays
    ] == ["other"]
    assert len(make_picture(told(*[other] * 100)).displays) == 32


# -- HTML


def test_lines_are_escaped_and_errors_marked() -> None:
    said = (
        line("<script>alert(1)</script>"),
        line("10%\r20%\r30%"),
        line("careful", stream="stderr"),
        line("Traceback (most recent call last):", stream="stderr"),
        line('  File "x.py"', stream="stderr"),
        line("OSError: gone", stream="stderr"),
        line("goes on"),
    )
    output = Output(total=6, lines=tuple(each for one in said for each in split_lines(one)))
    assert [mark for mark, _ in lines.classify_lines(output.lines)] == [
        "",
        "",
        "err",
        "trace",
        "trace",
        "trace",
        "",
    ]
    shown = lines.render_lines(0, output)
    assert "<script" not in shown and "&lt;script&gt;" in shown
    assert "30%" in shown and "10%" not in shown
    assert lines.has_errors(output)
    long = lines.render_lines(0, Output(total=1, lines=(*split_lines(line("x" * 100_000)),)))
    assert len(long) < 3000


def test_the_static_page_has_all_and_no_script() -> None:
    html = Display(rank=0, time=0.0, data={"text/html": "<script>x</script>", "text/plain": "needs scripts"})
    image = Display(rank=0, time=0.0, data={"image/png": "aGFsbG8=", "text/plain": "<Figure>"})
    events = [
        running(0), running(1), line("<script>"), html, image, raised(1),
        *(Metric(rank=0, time=0.0, step=step, values={"loss": 10.0**-step}) for step in range(4)),
    ]  # fmt: skip
    run = told(*events, outcome=Outcome(failures=(raised(1),), stopped=frozenset({0})), background=True)
    bundle = page.make_bundle(make_picture(run, {0: Usage(memory=3 << 30, cpu=99.0)}))
    html_text, text = bundle["text/html"], bundle["text/plain"]
    assert "<script" not in html_text and "<style" not in html_text
    for word in ("✗ failed", "needs scripts", ">rank 0</div><pre",
                 "data:image/png;base64,aGFsbG8=", "bad &lt;b&gt;", "3.00 GiB", "99 %",
                 "data:image/svg+xml", "logarithmic", "of rank 0: 1 line<", '<th scope="row"',
                 '<th scope="col"'):  # fmt: skip
        assert word in html_text, word
    assert "GPU" not in html_text, "nobody knows anything of it"
    for word in (
        "nothing on 2 processes: failed",
        "rank 0: stopped",
        "memory 3.00 GiB",
        "loss 0.001",
        "[0] <script>",
        "bad <b>",
    ):
        assert word in text, word


def test_names_that_are_no_text_can_be_drawn() -> None:
    values = [Metric(rank=0, time=101.0, step=step, values={"caf\udce9.png": 1.0}) for step in (1, 2)]
    shown = make_picture(told(*values))
    assert "data:image/svg+xml;base64," in page.render_page(shown)


def test_restarts_are_told() -> None:
    again = Phase(rank=-1, time=0.0, name="restarting")
    assert ", restarted once" in page.render_headline(make_picture(told(again)))
    text = page.render_text(make_picture(told(again, again)))
    assert re.match(r"nothing on 2 processes: starting for \d.* s, restarted 2 times", text)


def test_ranks_of_a_node_that_was_lost_are_not_shown_any_more() -> None:
    run = told(*(Phase(rank=rank, time=0.0, name="running", pid=rank + 1) for rank in (2, 3)))
    assert [state.rank for state in make_picture(run).ranks] == [0, 1, 2, 3]
    run.record.apply(Phase(rank=-1, time=0.0, name="restarting", detail="node lost"))
    run.record.apply(Phase(rank=0, time=0.0, name="running", pid=5))
    assert [(state.rank, state.status) for state in make_picture(run).ranks] == [
        (0, "running"),
        (1, "starting"),
    ]


# -- which view


@pytest.mark.parametrize(
    ("view", "variable", "expected"),
    [
        ("auto", None, "widget"),
        ("auto", "text", "text"),
        ("none", "text", "none"),
        ("widget", "none", "widget"),
    ],
)
def test_the_environment_says_what_auto_is(
    view: View, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTEBOOK_ACCEL_VIEW", raising=False)
    if variable is not None:
        monkeypatch.setenv("NOTEBOOK_ACCEL_VIEW", variable)
    assert resolve_view(view) == expected


def test_a_view_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="view='tv': choose among 'auto', 'widget', 'text', 'none'"):
        notebook_launcher(nothing, num_processes=1, view="tv")  # type: ignore[arg-type]
    monkeypatch.setenv("NOTEBOOK_ACCEL_VIEW", "tv")
    with pytest.raises(ValueError, match="NOTEBOOK_ACCEL_VIEW='tv'"):
        notebook_launcher(nothing, num_processes=1)


def test_a_launch_imports_neither_form_nor_widgets() -> None:
    script = """
        import sys
        import notebook_accel.widgets.run, notebook_accel.widgets.run.text
        heavy = ("ipywidgets", "pydantic", "notebook_accel.widgets.form", "notebook_accel.widgets.view")
        wrong = [name for name in heavy if name in sys.modules]
        sys.exit(", ".join(wrong) or 0)
    """
    import textwrap

    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


# -- print_metrics


def metrics_of_a_run() -> None:
    print_metrics({"val/loss": 0.123456}, step=10, note="fine")
    print_metrics(accuracy=0.9)


def test_metrics_are_printed_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(metrics_of_a_run, num_processes=1, view="none")
    assert "step 10: val/loss 0.1235, note fine\naccuracy 0.9\n" in capsys.readouterr().out
    with pytest.raises(TypeError, match="by name"):
        print_metrics(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["x", float("inf"), [1, 2], torch.ones(2)], ids=str)
def test_a_wrong_step_is_named(step: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^step=.*: a whole number is needed$"):
        print_metrics(step=step, loss=1)


def test_a_step_may_be_a_tensor_or_a_text_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    for step in (torch.tensor([3]), "3", 3.0):
        print_metrics(step=step, loss=1.0)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "step 3: loss 1\n" * 3


def test_other_ranks_print_no_metrics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    print_metrics(loss=1.0)
    assert capsys.readouterr().out == ""
