"""Every launch option on its whole way: flag, config, file, form, config, environment, process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel import environ
from notebook_accel.cli import flags
from notebook_accel.cli.launch import launch
from notebook_accel.config import export, file
from notebook_accel.config import launch as by_config
from notebook_accel.config.option import Option, as_text
from notebook_accel.config.schema import LaunchConfig, flat_values, has_effect, table
from notebook_accel.widgets import ConfigForm
from notebook_accel.widgets.draft import read_text, write_text
from tests.unit.config_values import OPTIONS, beside, configs, legal, nested

_NO_TEXT = (None, "", (), {})
"""Values that a flag or a field cannot spell: they are what is meant where nothing is said."""


def words_of(option: Option, value: Any) -> list[str]:
    """Return the words of a command line that give an option a value."""
    flag = f"--{option.face.flag}"
    several = option.kind is tuple and option.name != "fp8_config.override_linear_precision"
    return [f"{flag}={as_text(one)}" for one in (value if several else [value])]


def by_flags(values: dict[str, Any]) -> LaunchConfig:
    """Return the config of a command line; what has no flag, and what is not said by one, is there already."""
    named = {option.name for option in flags.options()}
    spoken = {name: value for name, value in values.items() if name in named and value not in _NO_TEXT}
    others = {name: value for name, value in values.items() if name not in spoken}
    words = [word for name, value in spoken.items() for word in words_of(OPTIONS[name], value)]
    with launch.make_context("launch", [*words, "train.py"]) as ctx:
        return flags.apply(LaunchConfig.model_validate(nested(others)), ctx.params)


def told(option: Option, text: str) -> Any:
    """Return the value that a variable's text means."""
    if option.choices is not None:
        return next(choice for choice in option.choices if as_text(choice) == text)
    if option.kind is bool:
        return environ.parse_bool(text)
    if option.kind in (int, float) and text != "auto":
        return option.kind(text)
    return tuple(text.split(",")) if option.kind is tuple else text


def along(config: LaunchConfig, folder: Path) -> LaunchConfig:
    """Return what comes out behind a file and a form that is filled by hand."""
    path = folder / "c.yaml"
    path.unlink(missing_ok=True)
    read = file.read(config.write(path)).config
    assert read == config
    loaded = ConfigForm(path).config
    assert loaded == config
    form = ConfigForm(LaunchConfig())
    for name, value in flat_values(loaded).items():
        option = OPTIONS[name]
        if value == option.default:
            continue
        typed = option.choices is None and option.kind is not bool and value not in _NO_TEXT
        form.set(**{name.replace(".", "__"): read_text(option, write_text(value)) if typed else value})
    form.save(path, overwrite=True)
    return form.config


def check_the_way(values: dict[str, Any], folder: Path) -> None:
    config = by_flags(values)
    flat = flat_values(config)
    for name, value in values.items():
        assert flat[name] == value and type(flat[name]) is type(value), name
    arrived = along(config, folder)
    assert arrived == config
    texts = export.environment(
        arrived, [name for name, option in OPTIONS.items() if has_effect(option, flat)]
    )
    speaking = {  # of several with the same variable the last that says something
        option.face.env: option
        for option in table()
        if option.face.env and flat[option.name] is not None and has_effect(option, flat)
    }
    assert {name: told(option, texts[str(name)]) for name, option in speaking.items()} == {
        name: flat[option.name] for name, option in speaking.items()
    }
    silent = {str(option.face.env) for option in table() if option.face.env} - speaking.keys()
    assert not silent & texts.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("way")


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_each_option_arrives(folder: Path, name: str, data: st.DataObject) -> None:
    option = OPTIONS[name]
    value = data.draw(legal(option))
    values = {**beside(option, value), name: value}
    for same in table():  # which have the same flag
        if (
            option.face.flag is not None
            and same.face.flag == option.face.flag
            and value not in ("auto", None)
        ):
            values[same.name] = value
    check_the_way(values, folder)


@settings(max_examples=25, deadline=None)
@given(config=configs())
def test_many_options_arrive_together(folder: Path, config: LaunchConfig) -> None:
    assert along(config, folder) == config
    arguments = by_config.arguments(config.with_options(compute_environment="LOCAL_MACHINE"), ()).values
    for name, of in {
        "mixed_precision": "mixed_precision",
        "num_processes": "num_processes",
        "use_port": "main_process_port",
    }.items():
        assert arguments.get(name, OPTIONS[of].default) == getattr(config, of)
