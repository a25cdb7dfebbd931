"""ConfigForm: the options of a launch as a form in the notebook, and as a table where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accel.config import basic, document, file
from notebook_accel.config import launch as by_config
from notebook_accel.config.option import Option
from notebook_accel.config.schema import LaunchConfig, table
from notebook_accel.errors import ConfigError, Problem
from notebook_accel.launchers import notebook_launcher

from .draft import Draft, as_table

if TYPE_CHECKING:
    from .view import FormView


class ConfigForm:
    """A form for the options of a launch: the last value of a cell, it shows itself.

    It shows the options that have an effect beside the choices so far, checks them while the user types, and shows the
    file that it would write. Without widgets it prints as a table.

    Args:
        config: what to start from, as `notebook_launcher(config=...)` takes it; None is a config for the devices
            of this machine, none of which is initialised.
        path: the file of the buttons Load and Save; None is the default config file.
        function: what the button Launch runs, as `function(*args)`, with the form's config; None is no button.
        args: arguments of the function.

    Attributes:
        result: what the last launch by the button returned.

    Raises:
        ConfigError: the config cannot be read, or is wrong.
    """

    def __init__(
        self,
        config: by_config.Source | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        function: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
    ) -> None:
        if path is None and isinstance(config, (str, os.PathLike)) and config != "default":
            path = config
        self.path = file.default_path() if path is None else Path(path)
        self.function = function
        self.args = args
        self.result: Any = None
        self._draft = Draft(basic.detect() if config is None else by_config.find_config(config))
        self._view: FormView | None = None

    @property
    def config(self) -> LaunchConfig:
        """The config with the present values.

        Raises:
            ConfigError: lists everything that is wrong.
        """
        return self._draft.config

    def set(self, **values: Any) -> None:
        """Change options.

        Args:
            values: by the names of the options, `fsdp_config__fsdp_version` for one of a section. A wrong value is kept
                and shown with a sentence.

        Raises:
            TypeError: no option has this name.
        """
        options: dict[str, Option] = {option.name.replace(".", "__"): option for option in table()}
        if unknown := values.keys() - options:
            raise TypeError(f"{', '.join(sorted(unknown))}: no option is called so, see print(form)")
        for name, value in values.items():
            self._draft.change(options[name].name, value)
        self._refresh()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take all options from a file.

        Raises:
            ConfigError: lists everything that is wrong; the form stays as it is.
        """
        found = file.read(path)
        self.path = found.path
        self._draft.replace(found.config)
        self._refresh()

    def save(self, path: str | os.PathLike[str] | None = None, overwrite: bool = False) -> Path:
        """Write the config to a file.

        Args:
            path: of the file; None is the one in the form.
            overwrite: replace a file that is there.

        Returns:
            The path that was written.

        Raises:
            ConfigError: an option is wrong, or the name is none of a config file.
            FileExistsError: the file is there, and `overwrite` is False.
        """
        config = self.config
        target = document.expand(self.path if path is None else path)
        if target.is_dir():
            text = f"{target} is a folder: name a file, such as {target / 'default_config.yaml'}"
            raise ConfigError([Problem(name="", text=text)])
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} is there already: overwrite=True replaces it")
        self.path = config.write(target, replace=True)
        self._refresh()
        return self.path

    def launch(self) -> Any:
        """Run the form's function with the form's config and return what `notebook_launcher` returns.

        Raises:
            ConfigError: an option is wrong.
            TypeError: the form was given no function.
        """
        __tracebackhide__ = True
        if self.function is None:
            raise TypeError("this form has nothing to launch: ConfigForm(function=train, args=(...))")
        self.result = notebook_launcher(self.function, self.args, config=self.config, view="text")
        return self.result

    @property
    def view(self) -> FormView:
        """The widgets, which are made at the first use.

        Raises:
            ImportError: ipywidgets is not installed.
        """
        if self._view is None:
            from .view import FormView

            self._view = FormView(self, self._draft)
        return self._view

    def __repr__(self) -> str:
        return as_table(self._draft)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Return the widgets for a notebook, and the table for what cannot show them."""
        bundle: dict[str, Any] = {"text/plain": repr(self)}
        if _in_a_kernel():
            try:
                model = self.view.box.model_id
            except ImportError:
                return bundle
            bundle["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": model,
            }
        return bundle

    def _refresh(self) -> None:
        if self._view is not None:
            self._view.refresh()


def _in_a_kernel() -> bool:
    """Whether a notebook may be listening: IPython in a terminal has no kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
