"""The widgets of one option: its control, its help text, and the sentence about a wrong value."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any, Final

import ipywidgets

from notebook_accel.config.option import Option, as_text

from .draft import read_text, write_text

# JupyterLab's variables, and colours that can be read on light and on dark where there are none (Colab, VS Code)
# ipywidgets 7 brings a lighter red to the classic notebook, which is white.
STYLE: Final = """<style>
body.notebook_app .accel-form { --jp-error-color1: #d32f2f; }
.accel-form { max-width: 64em; }
.accel-form .accel-title { font-weight: 600; margin: 0.8em 0 0.2em; padding-bottom: 0.2em;
  border-bottom: 1px solid var(--jp-border-color2, rgba(127, 127, 127, 0.4)); }
.accel-form .accel-row { flex-wrap: wrap; align-items: flex-start; overflow: visible; margin: 1px 0; }
.accel-form .accel-row > .accel-note { flex: 1 1 16em; min-width: 16em; margin: 2px 0 2px 8px; }
.accel-form .accel-note .widget-html-content { line-height: 1.35; align-self: flex-start; padding-top: 5px; }
.accel-form .accel-help { opacity: 0.75; }
.accel-form .accel-row .widget-label { white-space: normal; overflow-wrap: anywhere; line-height: 1.2;
  padding-top: 6px; height: auto; flex-shrink: 1; }
.accel-form .accel-row input:not([type="checkbox"]), .accel-form .accel-row select, .accel-form .accel-row textarea {
  min-width: 9em; }
.accel-form .accel-row .widget-label-basic { display: flex; flex-direction: row-reverse; justify-content: flex-end;
  align-items: center; min-height: 28px; }
.accel-form .accel-row .widget-label-basic span { flex: 0 0 20em; text-align: right; margin-right: 8px;
  white-space: normal; overflow-wrap: anywhere; line-height: 1.2; }
.accel-form select { appearance: auto; background-image: none !important; }
.accel-form .accel-wrong { color: var(--jp-error-color1, #e5484d); font-weight: 600; white-space: pre-wrap; }
.accel-form .accel-is-wrong input, .accel-form .accel-is-wrong textarea, .accel-form .accel-is-wrong select {
  border-color: var(--jp-error-color1, #e5484d) !important; }
.accel-form .accel-preview pre { margin: 0; white-space: pre-wrap; word-break: normal;
  padding: 0.6em 0.8em; line-height: 1.35; overflow: auto; max-height: 24em;
  color: inherit; background: var(--jp-layout-color2, rgba(127, 127, 127, 0.12));
  border: 1px solid var(--jp-border-color2, rgba(127, 127, 127, 0.4)); }
.accel-form .accel-bar { flex-wrap: wrap; overflow: visible; margin-top: 0.6em; }
.accel-form .accel-status .widget-html-content { line-height: 1.35; white-space: pre-wrap; }
</style>"""

_QUOTED: Final = re.compile("`([^`]+)`")


class Field:
    """An option's row in the form.

    Args:
        option: the option.
        changed: called with the option's name and the new value, whenever the user changes it.

    Attributes:
        control: the widget that the user changes.
        row: the control with the help text and the sentence.
    """

    def __init__(self, option: Option, changed: Callable[[str, Any], None]) -> None:
        self.option = option
        self._changed = changed
        self._filling = False
        self._filled = False
        self.control = self._control()
        self.control.layout.width = "36em"
        self.control.layout.max_width = "100%"
        self.control.style.description_width = "20em"
        self.control.observe(self._on_change, names="value")
        self._note = ipywidgets.HTML()
        self._note.add_class("accel-note")
        self.row = ipywidgets.HBox([self.control, self._note])
        self.row.add_class("accel-row")
        self.say("")

    def fill(self, value: Any) -> None:
        """Show a value."""
        self._filling = True
        try:
            if isinstance(self.control, ipywidgets.Dropdown):
                self.control.options = self._choices(value)
                self.control.value = value
            elif isinstance(self.control, ipywidgets.Checkbox):
                if isinstance(value, bool):
                    self.control.value = value
            elif self._value() != value or not self._filled:  # else the user is typing this value
                self.control.value = write_text(value)
        finally:
            self._filling = False
        self._filled = True

    def say(self, sentence: str) -> None:
        """Show a sentence about a wrong value; an empty one removes it."""
        words = _QUOTED.sub(r"<code>\1</code>", html.escape(self.option.help))
        text = f'<div class="accel-help">{words}</div>'
        if sentence:
            text = f'<div class="accel-wrong" role="alert">{html.escape(sentence)}</div>{text}'
            self.row.add_class("accel-is-wrong")
        else:
            self.row.remove_class("accel-is-wrong")
        if self._note.value != text:
            self._note.value = text

    def _control(self) -> Any:
        option = self.option
        label = option.path[-1]
        if option.choices is not None or (option.kind is bool and option.optional):
            return ipywidgets.Dropdown(description=label, options=self._choices(option.default))
        if option.kind is bool:
            return ipywidgets.Checkbox(description=label, indent=False)
        placeholder = write_text(option.default)
        if option.kind in (tuple, dict):
            hint = "name=value on each line" if option.kind is dict else "one on each line"
            return ipywidgets.Textarea(description=label, placeholder=placeholder or hint, rows=3)
        return ipywidgets.Text(description=label, placeholder=placeholder or "default")

    def _choices(self, value: Any) -> list[tuple[str, Any]]:
        """Return the legal values with their names.

        None is among them where it is the default or the present value: a file cannot say it otherwise.
        """
        choices = self.option.choices or (True, False)
        found = [(as_text(choice), choice) for choice in choices]
        if self.option.optional and (self.option.default is None or value is None):
            found.insert(0, ("default" if self.option.default is None else "none", None))
        if value not in [choice for _, choice in found]:  # a wrong one, from Python
            found.append((as_text(value), value))
        return found

    def _value(self) -> Any:
        if isinstance(self.control, (ipywidgets.Dropdown, ipywidgets.Checkbox)):
            return self.control.value
        return read_text(self.option, self.control.value)

    def _on_change(self, change: Any) -> None:
        if not self._filling:
            self._changed(self.option.name, self._value())
