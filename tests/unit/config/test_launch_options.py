"""A row of the table of options is all that a new option needs."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_accel import ConfigError, notebook_launcher
from notebook_accel.config import arguments
from notebook_accel.config import launch as by_config
from notebook_accel.config.argument_checks import find_problems
from notebook_accel.config.schema import LaunchConfig, flat_values, table
from notebook_accel.launch.engines import base

NEW_ROW = """
import sys
from notebook_accel.config.launch_options import LaunchOptions
from notebook_accel.config.option import Argument, option

LaunchOptions.niceness = option(
    0, "How much the workers leave to others.", ge=0, le=19, env="NICENESS", file=False, argument=Argument(name="nice")
)
LaunchOptions.__annotations__["niceness"] = "int"

from notebook_accel.config import arguments, export, tables
from notebook_accel.config import launch as by_config
from notebook_accel.config.argument_checks import find_problems
from notebook_accel.config.schema import LaunchConfig, table
from notebook_accel.cli import flags
from notebook_accel.cli.launch import launch
from notebook_accel.cli.questions import Questionnaire
from notebook_accel.launch import preflight
from notebook_accel.launch.request import LaunchRequest
from notebook_accel.session.core import resolve_options
from notebook_accel.widgets import ConfigForm

config = LaunchConfig(niceness=5)
assert LaunchConfig.read(config.write(sys.argv[1])) == config and "niceness: 5" in open(sys.argv[1]).read()
with launch.make_context("launch", ["--niceness", "5", "train.py"]) as ctx:
    assert flags.apply(LaunchConfig(), ctx.params) == config
(row,) = [row for row in table() if row.name == "niceness"]
asking = Questionnaire(lambda answers: LaunchConfig(), {})
assert asking._is_asked(row) and asking._problem(row, 20) == "niceness 20 is more than 19"
form = ConfigForm(LaunchConfig())
form.view.fields["niceness"].control.value = "5"
assert form.config == config
assert "How much the workers" in form.view.fields["niceness"].row.children[1].value
assert export.environment(config)["NICENESS"] == "5"
assert by_config.arguments(config, ()).values == {"nice": 5}
assert by_config.arguments(config, ["nice"]).values == {}
options = {"nice": 5, "num_processes": 2, "environment": {"ACCELERATE_USE_CPU": "true"}}
job, _ = preflight.check(LaunchRequest(function=print, options=options), "notebook_launcher")
assert job.environment["NICENESS"] == "5"
of_session = resolve_options({**arguments.defaults(), "num_processes": 2}, {}, config)
assert of_session["environment"]["NICENESS"] == "5"
[problem] = find_problems(arguments.checks(), {"nice": 20}, {})["nice"]
assert str(problem) == "nice=20: at most 19 is needed" and type(problem) is ValueError
assert "| `nice` | `niceness` | `0` | How much the workers leave to others. |" in tables.as_markdown()
"""


def test_a_new_row_is_found_in_every_face(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NEW_ROW, f"{tmp_path}/c.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_the_launcher_has_the_defaults_of_the_table() -> None:
    parameters = inspect.signature(notebook_launcher).parameters
    ours = {name: option.argument_default for name, option in arguments.options().items()}
    theirs = {name: parameter.default for name, parameter in parameters.items()}
    for name in ("function", "args", "config"):
        del theirs[name]
    assert theirs == ours


def test_the_launchers_docstring_has_each_argument() -> None:
    said = (
        inspect.cleandoc(notebook_launcher.__doc__ or "").partition("Args:\n")[2].partition("\nReturns:\n")[0]
    )
    described = re.findall(r"^    (\w+): ", said, re.MULTILINE)
    assert described == list(inspect.signature(notebook_launcher).parameters)


def test_a_config_without_a_choice_says_nothing_to_a_launch() -> None:
    assert not by_config.arguments(LaunchConfig(), ()).values
    flat = flat_values(LaunchConfig())
    for option in arguments.options().values():
        assert option.row.argument is not None
        if option.row.argument.convert is not None:
            assert option.row.argument.convert(option.default, flat) == option.argument_default, option.name


def test_a_range_of_nodes_is_two_options(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_machines: 1:4\n")
    config = LaunchConfig.read(path)
    assert (config.min_machines, config.num_machines) == (1, 4)
    assert LaunchConfig.read(config.write(path)) == config
    with pytest.raises(ConfigError, match="min_machines 5 > num_machines 4"):
        LaunchConfig.model_validate({"num_machines": "5:4"})
    with pytest.raises(ConfigError, match="num_machines 'x' is no whole number"):
        LaunchConfig.model_validate({"num_machines": "1:x"})


def test_every_default_passes_its_check() -> None:
    defaults = {name: option.argument_default for name, option in arguments.options().items()}
    wrong = [
        problem for name, check in arguments.checks().items() for problem in check.check(name, defaults[name])
    ]
    assert not wrong
    assert not find_problems(arguments.checks(), defaults, {})


def test_a_variable_decides_in_place_of_a_default_only() -> None:
    variables = {"NOTEBOOK_ACCEL_VIEW": "loud"}
    [problem] = find_problems(arguments.checks(), {"view": "auto"}, variables)["view"]
    assert str(problem).startswith("environment variable NOTEBOOK_ACCEL_VIEW='loud': choose among 'auto'")
    assert not find_problems(arguments.checks(), {"view": "text"}, variables)


def test_the_arguments_of_a_config() -> None:
    config = LaunchConfig(
        num_processes=8,
        num_machines=4,
        min_machines=2,
        main_process_ip="10.0.0.1",
        output="0, 2",
        rdzv_conf="timeout=3",
        hang_timeout=0,
        tpu_mode="spmd",
        distributed_type="XLA",
    )
    found = by_config.arguments(config, ())
    assert found.values == {
        "num_processes": 2,
        "num_nodes": "2:4",
        "rdzv_backend": "c10d",
        "master_addr": "10.0.0.1",
        "output": [0, 2],
        "rdzv_conf": {"timeout": 3},
        "hang_timeout": None,
        "tpu_mode": "spmd",
    }
    assert "NOTEBOOK_ACCEL_TPU_MODE" not in found.environment, "the argument says it"


@pytest.mark.parametrize("name", base.BUILT_IN)
def test_the_table_names_no_engine_that_refuses_the_option(name: str) -> None:
    module, _, kind = base.BUILT_IN[name].partition(":")
    engine = getattr(importlib.import_module(f"notebook_accel.launch.engines.{module}"), kind)
    known = arguments.options()
    assert not engine.refuses.keys() - known.keys()
    assert not [refused for refused in engine.refuses if name in known[refused].row.engines]
    assert not [option.name for option in known.values() if set(option.row.engines) - base.BUILT_IN.keys()]


def test_options_of_notebooks_alone_have_no_flag() -> None:
    rows = {option.name: option for option in table() if option.row.launches == "notebooks"}
    assert {"block", "returns", "view"} <= rows.keys()
    assert not any(option.face.flag for option in rows.values())


def test_arguments_are_checked_without_pydantic() -> None:
    code = "import sys; from notebook_accel.launch import preflight; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_secret_is_in_no_face_of_a_config() -> None:
    """So no file, flag, question, form, report or exported notebook can show it."""
    assert "secret" in arguments.options() and "secret" not in arguments.of_configs()
    assert "secret" not in {option.name for option in table()}
    with pytest.raises(ConfigError, match="secret"):
        LaunchConfig.model_validate({"secret": "correct horse battery staple"})
