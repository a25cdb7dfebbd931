"""The output of a notebook's cells in the terminal: streams as they come, displays that change in their last state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import rich_click as click

from ..events import Progress
from ..stream.sinks import TerminalRows
from .widget_bars import VIEW, WidgetBars

_SHARE: Final = re.compile(r"(\d+)%")


@dataclasses.dataclass(kw_only=True, slots=True)
class _Display:
    number: int
    text: str = ""
    printed: str = ""
    has_changed: bool = False
    is_open: bool = False  # a bar that is known to go on

    @property
    def is_due(self) -> bool:
        """Whether there is a text that is not printed; all states of a full bar count as one."""
        return self.text not in ("", self.printed) and not (_is_full(self.text) and _is_full(self.printed))

    @property
    def is_settled(self) -> bool:
        """Whether it looks as if the text stays as it is."""
        return not self.is_open and (not self.has_changed or _is_full(self.text))


def _is_full(text: str) -> bool:
    """Return whether a text is that of a bar at its end: the first share in it is all."""
    found = _SHARE.search(text)
    return found is not None and found[1] == "100"


class NotebookOutput:
    """Prints outputs; of a display with an id, which may be updated, the last state.

    It is printed before the next output if it was not updated until then or is a full bar, else at the end of the cell.
    Until then a terminal has it below all other output, if it is one line.
    """

    def __init__(self) -> None:
        self._rows = TerminalRows()
        self._displays: dict[str, _Display] = {}
        self._widgets = WidgetBars()
        self._due: dict[int, _Display] = {}  # by number
        self._of_cell: list[str] = []
        self._count = 0
        self._unended: set[bool] = set()  # whether it is stderr; a row would replace the line
        self._will_forget = False  # at the next output

    def show(self, kind: str, content: Mapping[str, Any]) -> None:
        """Show a message of the kernel.

        Args:
            kind: of the message; most kinds show nothing.
            content: of the message.
        """
        name = (content.get("transient") or {}).get("display_id")
        if kind == "stream":
            self._print(content["text"], err=content.get("name") == "stderr")
        elif kind == "error":
            self._print("\n".join(content["traceback"]) + "\n", err=True)
        elif kind.startswith("comm_"):
            self._note_widget(kind, content)
        elif kind == "clear_output":
            self._will_forget = True
            if not content.get("wait"):
                self._forget()
        elif kind in ("display_data", "execute_result", "update_display_data"):
            text = content["data"].get("text/plain")
            widget = str((content["data"].get(VIEW) or {}).get("model_id", ""))
            if widget and self._widgets.find(widget):
                self._show_bar(widget)
            elif kind == "update_display_data":
                self._update(name, text)
            elif kind == "display_data" and name is not None:
                self._add(name, text or "")
            elif text is not None:
                self._print(f"{text}\n")

    def say(self, text: str) -> None:
        """Write a sentence of the launch itself to the error stream."""
        self._rows.clear()
        click.echo(f"notebook-accel: {text}", err=True)
        self._draw()

    def end_cell(self) -> None:
        """Print what displays were at last."""
        self._print_displays(list(self._due.values()))
        self._of_cell.clear()
        self._unended.clear()
        self._will_forget = False

    def _add(self, name: str, text: str) -> None:
        self._forget()
        self._print_settled()
        self._count += 1
        self._displays[name] = shown = _Display(number=self._count)
        self._of_cell.append(name)
        self._change(shown, text)

    def _show_bar(self, widget: str) -> None:
        if VIEW + widget not in self._displays:
            self._add(VIEW + widget, self._widgets.read(widget))
        self._displays[VIEW + widget].is_open = not self._widgets.is_over(widget)

    def _note_widget(self, kind: str, content: Mapping[str, Any]) -> None:
        widget = self._widgets.note(kind, content)
        if widget and (shown := self._displays.get(VIEW + widget)) is not None:
            shown.is_open = not self._widgets.is_over(widget)
            self._update(VIEW + widget, self._widgets.read(widget))

    def _update(self, name: str | None, text: str | None) -> None:
        shown = self._displays.get(name or "")
        if shown is not None and text is not None and text != shown.text:
            shown.has_changed = True
            self._change(shown, text)

    def _change(self, shown: _Display, text: str) -> None:
        shown.text = text
        if shown.is_due:
            self._due[shown.number] = shown
        else:
            self._remove(shown)
        self._draw()

    def _forget(self) -> None:
        """Drop the displays of this cell, if they were cleared: a notebook has no updates of them any more."""
        if not self._will_forget:
            return
        self._will_forget = False
        for name in self._of_cell:
            if (shown := self._displays.pop(name, None)) is not None:
                self._remove(shown)
        self._of_cell.clear()

    def _print(self, text: str, *, err: bool = False) -> None:
        self._forget()
        self._print_settled()
        self._rows.clear()
        click.echo(text, nl=False, err=err)
        if text.endswith("\n"):
            self._unended.discard(err)
        elif text:
            self._unended.add(err)
        self._draw()

    def _print_settled(self) -> None:
        self._print_displays([shown for shown in self._due.values() if shown.is_settled])

    def _print_displays(self, displays: Sequence[_Display]) -> None:
        for shown in displays:
            self._remove(shown)
            self._rows.clear()
            click.echo(shown.text)
            shown.printed = shown.text

    def _draw(self) -> None:
        if not self._unended:
            for shown in self._due.values():
                self._rows.show_bar(_make_state(shown, finished="\n" in shown.text))

    def _remove(self, shown: _Display) -> None:
        if self._due.pop(shown.number, None) is not None:
            self._rows.show_bar(_make_state(shown, finished=True))


def _make_state(shown: _Display, *, finished: bool) -> Progress:
    return Progress(
        rank=0,
        time=0.0,
        bar=shown.number,
        description="",
        count=0.0,
        total=None,
        text=shown.text,
        finished=finished,
        leave=False,
    )
