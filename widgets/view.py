"""The widgets of the form, and what its buttons do."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ipywidgets

from notebook_accel.config import file
from notebook_accel.config.option import Option
from notebook_accel.errors import ConfigError

from . import main_thread
from .draft import Draft, group_by_section
from .fields import STYLE, Field

_SAVE = "Save"
_OVERWRITE = "Overwrite?"


class Form(Protocol):
    """What the buttons of a form do.

    Attributes:
        path: the file of the buttons Load and Save.
        function: what the button Launch runs; None is no button.
    """

    path: Path
    function: Callable[..., Any] | None

    def load(self, path: Path) -> None:
        """Take all options from a file."""

    def save(self, *, overwrite: bool) -> Path:
        """Write the options to the file, and return its path."""

    def launch(self) -> Any:
        """Run the function with the options, and return what it returns."""


class FormView:
    """The widgets of a form; a field is made when it is first shown.

    Args:
        form: what the buttons act on.
        draft: the values that the fields show and change.

    Attributes:
        box: the widget with all others in it.
        fields: the fields made so far, by the names of their options.
        all_options: the checkbox that shows the expert options too.
        path: the text field with the path of the file.
        load, save, launch: the buttons; `launch` is None where the form has no function.
        preview: the text that would be written to the file, as HTML.
        status: what the last click did, as HTML.
        output: what a launch prints and displays; None before the first one.
    """

    def __init__(self, form: Form, draft: Draft) -> None:
        self._form = form
        self._draft = draft
        self._groups: dict[str, Any] = {}
        self._drawing = False
        self.fields: dict[str, Field] = {}
        self.all_options = ipywidgets.Checkbox(description="All options", indent=False)
        self.all_options.observe(lambda _: self.refresh(), names="value")
        self._options = ipywidgets.VBox()
        self.preview = ipywidgets.HTML()
        self.preview.add_class("accel-preview")
        self.path = ipywidgets.Text(description="File", value=str(form.path))
        self.path.layout.width = "36em"
        self.path.layout.max_width = "100%"
        self.path.style.description_width = "3em"
        self.path.observe(self._on_path, names="value")
        self.load = self._button("Load", "Take all options from the file", self._on_load)
        self.save = self._button(_SAVE, "Write the options to the file", self._on_save)
        buttons = [self.path, self.load, self.save]
        self.launch: Any = None
        if form.function is not None:
            self.launch = self._button("Launch", "Run the function with these options", self._on_launch)
            self.launch.button_style = "primary"
            buttons.append(self.launch)
        bar = ipywidgets.HBox(buttons)
        bar.add_class("accel-bar")
        self.status = ipywidgets.HTML()
        self.status.add_class("accel-status")
        self.output: Any = None
        preview_title = _title("The file")
        self.box = ipywidgets.VBox(
            [
                ipywidgets.HTML(STYLE),
                self._options,
                self.all_options,
                preview_title,
                self.preview,
                bar,
                self.status,
            ]
        )
        self.box.add_class("accel-form")
        self.refresh()

    def refresh(self) -> None:
        """Show the values of the draft."""
        sections = group_by_section(self._draft.visible_options(expert=self.all_options.value))
        for title, options in sections.items():
            if title not in self._groups:
                self._groups[title] = ipywidgets.VBox([_title(title)])
            group = self._groups[title]
            _show(group, (group.children[0], *(self._row(option) for option in options)))
        _show(self._options, tuple(self._groups[title] for title in sections))
        self._show_outcome()
        self._drawing = True
        self.path.value = str(self._form.path)
        self._drawing = False
        self._ask(_SAVE)

    def say(self, text: str, *, wrong: bool = False) -> None:
        """Show a sentence about the last click."""
        kind, role = ("accel-wrong", "alert") if wrong else ("accel-help", "status")
        self.status.value = f'<div class="{kind}" role="{role}">{html.escape(text)}</div>' if text else ""

    def _row(self, option: Option) -> Any:
        """Return the row of an option with its present value."""
        if option.name not in self.fields:
            self.fields[option.name] = Field(option, self._on_change)
        field = self.fields[option.name]
        field.fill(self._draft.value(option.name))
        field.say(self._draft.sentences.get(option.name, ""))
        return field.row

    def _show_outcome(self) -> None:
        try:
            text = file.as_yaml(self._draft.config)
        except ConfigError as error:
            text = "\n".join(f"# {line}" for line in ["nothing to write yet:", *str(error).splitlines()])
        self.preview.value = (
            f'<pre tabindex="0" aria-label="What the file will say">{html.escape(text)}</pre>'
        )
        for button in (self.save, self.launch):
            if button is not None:
                button.disabled = bool(self._draft.sentences)
        general = self._draft.sentences.get("", "")
        self.say(general, wrong=bool(general))

    def _button(self, description: str, tooltip: str, clicked: Any) -> Any:
        button = ipywidgets.Button(description=description, tooltip=tooltip)
        button.layout.width = "7em"
        button.on_click(clicked)
        return button

    def _ask(self, description: str) -> None:
        self.save.description = description
        self.save.button_style = "warning" if description == _OVERWRITE else ""

    def _on_change(self, name: str, value: Any) -> None:
        self._draft.change(name, value)
        self.refresh()

    def _on_path(self, change: Any) -> None:
        if not self._drawing:
            self._form.path = Path(change["new"].strip())
            self._ask(_SAVE)

    def _on_load(self, _: Any) -> None:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._form.load(self._form.path)
        except ConfigError as error:
            self.say(str(error), wrong=True)
            return
        self.say("\n".join([f"Loaded {self._form.path}", *(str(warning.message) for warning in caught)]))

    def _on_save(self, _: Any) -> None:
        try:
            path = self._form.save(overwrite=self.save.description == _OVERWRITE)
        except FileExistsError:
            self._ask(_OVERWRITE)
            self.say(f"{self._form.path} is there already: a second click replaces it")
        except (ConfigError, OSError) as error:
            self.say(str(error), wrong=True)
        else:
            self.say(f"Saved {path}")

    def _on_launch(self, _: Any) -> None:
        self.launch.disabled = True
        self.say("Running; the kernel's interrupt button stops it")
        try:
            main_thread.run(self._launch)
        finally:
            self.launch.disabled = bool(self._draft.sentences)
            self.say("")

    def _launch(self) -> None:
        """Launch with all output and the error in the form."""
        __tracebackhide__ = True
        if (
            self.output is None
        ):  # not before: the classic notebook with ipywidgets 7 shows no box that has one
            self.output = ipywidgets.Output()
            self.output.add_class("accel-output")
            self.box.children += (self.output,)
        self.output.outputs = ()
        with self.output:
            value = self._form.launch()
            if value is not None:
                from IPython.display import display

                display(value)


def _title(text: str) -> Any:
    title = ipywidgets.HTML(
        f'<div class="accel-title" role="heading" aria-level="4">{html.escape(text)}</div>'
    )
    title.layout.width = "100%"
    return title


def _show(box: Any, children: tuple[Any, ...]) -> None:
    """Change a box's children only where they differ: the browser draws new children, and the focus is lost."""
    if box.children != children:
        box.children = children
