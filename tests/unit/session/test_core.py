"""Arguments of a session are checked before its workers start."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel import Session
from notebook_accel.config import arguments
from notebook_accel.config.schema import LaunchConfig
from notebook_accel.session.core import resolve_options


@pytest.mark.parametrize("config", [None, LaunchConfig(use_cpu=True)])
@pytest.mark.parametrize("environment", [3, {"ACCELERATE_USE_CPU": 1}])
def test_an_environment_that_is_none_is_named(environment: Any, config: LaunchConfig | None) -> None:
    with pytest.raises(
        TypeError, match=r"environment=.*: a dict is needed, its names and values are strings"
    ):
        Session(environment=environment, config=config)


def read(config: LaunchConfig, **given: Any) -> dict[str, Any]:
    """Return the options of a session that do not have the launcher's defaults."""
    names = ("num_processes", "start_method", "output", "hosts", "slurm", "num_nodes", "slurm_keep", "engine")
    defaults = {name: arguments.defaults()[name] for name in (*names, "hang_timeout")}
    found = resolve_options({**defaults, **given}, {}, config)
    return {name: value for name, value in found.items() if name in defaults and value != defaults[name]}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"hosts": ["gpu1", "gpu2:4"]}, {"hosts": ["gpu1", "gpu2:4"]}),
        (
            {"slurm": ["partition=gpu"], "num_machines": 2, "num_processes": 4, "slurm_keep": 5},
            {"slurm": {"partition": "gpu"}, "num_nodes": 2, "num_processes": 4, "slurm_keep": 5},
        ),
        ({"engine": "slurm"}, {"engine": "slurm"}),
        ({"start_method": "fresh", "output": "first"}, {"start_method": "fresh", "output": "first"}),
        ({"hang_timeout": 7}, {"hang_timeout": 7}),
        ({"max_restarts": 3, "use_cpu": True}, {}),
    ],
)
def test_what_a_config_says_counts(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    made = LaunchConfig(**config)
    found = read(made)
    if wanted.keys() <= {"start_method", "output", "hang_timeout"}:
        found.pop("num_processes", None)  # this machine's
    assert found == wanted
    given = {"hosts": ["other"], "start_method": "fork", "hang_timeout": 9, "num_processes": 1}
    assert read(made, **given).items() >= given.items(), "what the call says counts more"


def test_only_slurms_sessions_have_several_nodes() -> None:
    with pytest.raises(ValueError, match="num_nodes=2: it is for engine='slurm'"):
        Session(config=LaunchConfig(num_machines=2, num_processes=2))
