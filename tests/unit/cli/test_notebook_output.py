"""Tests for what the terminal shows of a notebook's cells."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from notebook_accel.cli.notebook_output import NotebookOutput
from notebook_accel.stream import sinks


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return the terminal that output and errors go to; rows are drawn at once. pytest would undo it in a fixture."""
    made = Terminal()
    monkeypatch.setattr(sinks, "_LIVE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    return made


def show(output: NotebookOutput, text: str | None, name: str = "", *, update: bool = False) -> None:
    """Show a display, without plain text where that is None."""
    data = {"text/html": "<b>"} if text is None else {"text/plain": text}
    content: dict[str, Any] = {
        "data": data,
        "metadata": {},
        "transient": {"display_id": name} if name else {},
    }
    output.show("update_display_data" if update else "display_data", content)


def write(output: NotebookOutput, text: str, stream: str = "stdout") -> None:
    output.show("stream", {"name": stream, "text": text})


def count_up(output: NotebookOutput, name: str, *texts: str) -> None:
    for index, text in enumerate(texts):
        show(output, text, name, update=index > 0)


def test_a_file_has_the_last_state_of_a_display(capsys: pytest.CaptureFixture[str]) -> None:
    output = NotebookOutput()
    count_up(output, "a", "0%", "50%", "100% 1 s", "100% 2 s")
    assert capsys.readouterr().out == ""
    write(output, "next\n")
    assert capsys.readouterr().out == "100% 2 s\nnext\n"
    show(output, "100% 3 s", "a", update=True)
    count_up(output, "b", "0%", "60%")
    write(output, "next\n")
    assert capsys.readouterr().out == "next\n"
    output.end_cell()
    output.end_cell()
    assert capsys.readouterr() == ("60%\n", "")


def test_what_is_not_updated_keeps_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    output = NotebookOutput()
    show(output, "one\nof two lines", "a")
    write(output, "between\n")
    show(output, "no id")
    show(output, "another", "b")
    output.show("execute_result", {"data": {"text/plain": "7"}})
    output.end_cell()
    assert capsys.readouterr().out == "one\nof two lines\nbetween\nno id\nanother\n7\n"


def test_a_display_of_an_earlier_cell_is_printed_again_where_it_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = NotebookOutput()
    show(output, "early", "a")
    output.end_cell()
    count_up(output, "b", "other")
    show(output, "late", "a", update=True)
    show(output, "late", "a", update=True)
    write(output, "now\n")
    output.end_cell()
    assert capsys.readouterr().out == "early\nother\nnow\nlate\n"


def test_what_is_empty_cleared_unknown_or_has_no_text_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = NotebookOutput()
    count_up(output, "empty", "10%", "")
    show(output, "unknown", "unknown", update=True)
    show(output, None)
    show(output, None, "html")
    show(output, "cleared", "cleared")
    output.show("clear_output", {"wait": False})
    show(output, "cleared", "cleared", update=True)
    output.show("status", {"execution_state": "idle"})
    output.end_cell()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_redraws_a_display_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    output = NotebookOutput()
    count_up(output, "a", "10%", "20%")
    assert terminal.getvalue() == "\r\x1b[K10%\r\x1b[K20%"
    write(output, "line\n")
    assert terminal.getvalue().endswith("20%\r\x1b[Kline\n\r\x1b[K20%")
    show(output, "90%", "a", update=True)
    output.end_cell()
    assert terminal.getvalue().endswith("\r\x1b[K90%\r\x1b[K90%\n")


def test_a_row_takes_no_place_of_an_unfinished_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    output = NotebookOutput()
    count_up(output, "a", "10%", "20%")
    write(output, "wait", "stderr")
    show(output, "30%", "a", update=True)
    assert terminal.getvalue().endswith("20%\r\x1b[Kwait")
    write(output, " over\n", "stderr")
    assert terminal.getvalue().endswith("wait over\n\r\x1b[K30%")


def test_several_lines_are_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    output = NotebookOutput()
    count_up(output, "a", "one", "one\ntwo", "one\nthree")
    output.say("note")
    output.end_cell()
    assert terminal.getvalue() == "\r\x1b[Kone\r\x1b[Knotebook-accel: note\none\nthree\n"


def test_what_is_to_be_cleared_at_the_next_output_stays_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = NotebookOutput()
    count_up(output, "a", "10%", "20%")
    output.show("clear_output", {"wait": True})
    write(output, "next\n")
    count_up(output, "b", "30%", "40%")
    output.show("clear_output", {"wait": True})
    output.end_cell()
    assert capsys.readouterr().out == "next\n40%\n"


def test_the_first_share_of_a_bar_says_whether_it_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    output = NotebookOutput()
    count_up(output, "a", "b:  0%", "b: 33%, acc=100%")
    write(output, "between\n")
    show(output, "b: 50%, acc=100%", "a", update=True)
    write(output, "between\n")
    show(output, "b: 100%, acc=100%", "a", update=True)
    output.end_cell()
    assert capsys.readouterr().out == "between\nbetween\nb: 100%, acc=100%\n"


def open_widget(output: NotebookOutput, name: str, kind: str, **state: Any) -> None:
    state = {"_model_name": kind, **state}
    content = {"comm_id": name, "target_name": "jupyter.widget", "data": {"state": state}}
    output.show("comm_open", content)


def change_widget(output: NotebookOutput, name: str, **state: Any) -> None:
    output.show("comm_msg", {"comm_id": name, "data": {"method": "update", "state": state}})


def open_bar(output: NotebookOutput) -> None:
    """Show a bar as tqdm makes it: a box with a text, a bar and a text."""
    open_widget(output, "look", "LayoutModel")
    open_widget(output, "left", "HTMLModel", value="<b>fit:</b>\xa00%")
    open_widget(output, "bar", "FloatProgressModel", value=0.0)
    open_widget(output, "right", "HTMLModel", value="0&lt;3")
    children = ["IPY_MODEL_left", "IPY_MODEL_bar", "IPY_MODEL_right"]
    open_widget(output, "box", "HBoxModel", children=children, layout="IPY_MODEL_look")
    show_widget(output, "box")


def show_widget(output: NotebookOutput, name: str) -> None:
    view = {"model_id": name, "version_major": 2}
    data = {"text/plain": "a widget", "application/vnd.jupyter.widget-view+json": view}
    output.show("display_data", {"data": data, "metadata": {}, "transient": {}})


def test_a_bar_of_widgets_is_a_line_in_its_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    output = NotebookOutput()
    open_bar(output)
    change_widget(output, "left", value="fit: 67%")
    change_widget(output, "right", value="2&lt;3")
    output.end_cell()
    assert capsys.readouterr().out == "fit: 67% 2<3\n"


@pytest.mark.parametrize("ends", ["hidden", "closed"])
def test_a_bar_of_widgets_that_does_not_stay_is_not_printed(
    ends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = NotebookOutput()
    open_bar(output)
    change_widget(output, "left", value="fit: 100%")
    if ends == "hidden":
        change_widget(output, "look", visibility="hidden")
    else:
        output.show("comm_close", {"comm_id": "box", "data": {}})
    output.end_cell()
    assert capsys.readouterr().out == ""


def test_a_full_bar_of_widgets_is_printed_once_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    output = NotebookOutput()
    open_bar(output)
    change_widget(output, "left", value="fit: 100%")
    write(output, "meanwhile\n")
    change_widget(output, "right", value="3&lt;3")
    change_widget(output, "bar", bar_style="success")
    write(output, "after\n")
    output.end_cell()
    assert capsys.readouterr().out == "meanwhile\nfit: 100% 3<3\nafter\n"


def test_a_message_of_a_widget_looks_at_its_own_bar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    output = NotebookOutput()
    open_bar(output)
    open_widget(output, "other box", "HBoxModel", children=["IPY_MODEL_a", "IPY_MODEL_b", "IPY_MODEL_c"])
    for name, kind in (("a", "HTMLModel"), ("b", "IntProgressModel"), ("c", "HTMLModel")):
        open_widget(output, name, kind)
    show_widget(output, "other box")
    read, seen = output._widgets.read, []
    monkeypatch.setattr(output._widgets, "read", lambda name: seen.append(name) or read(name))  # type: ignore[func-returns-value]
    change_widget(output, "a", value="50%")
    change_widget(output, "left", value="10%")
    assert seen == ["other box", "box"]


def test_other_widgets_are_their_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    output = NotebookOutput()
    open_widget(output, "slider", "IntSliderModel", value=3)
    open_widget(output, "bar", "IntProgressModel", value=3)
    open_widget(output, "form", "VBoxModel", children=["IPY_MODEL_slider", "IPY_MODEL_bar"])
    for name in ("slider", "bar", "form", "of another program"):
        show_widget(output, name)
    change_widget(output, "slider", value=4)
    change_widget(output, "bar", value=4)
    assert capsys.readouterr().out == "a widget\n" * 4
