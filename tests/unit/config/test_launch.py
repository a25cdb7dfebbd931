"""What a config says to a launch that has arguments of its own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from notebook_accel.config import launch
from notebook_accel.config.schema import LaunchConfig
from notebook_accel.session.core import resolve_options

BOTH = LaunchConfig(hosts=("gpu1", "gpu2"), slurm=("partition=gpu",), python="/opt/python")


@pytest.mark.parametrize(
    ("given", "names", "idle"),
    [
        ({"engine": "slurm"}, {"slurm", "python"}, "hosts of the config has no effect: .* engine='ssh'"),
        ({"engine": "ssh"}, {"hosts", "python"}, "slurm of the config has no effect: .* engine='slurm'"),
        ({"slurm": {"time": 3}}, {"python"}, "hosts of the config has no effect"),
        ({}, {"hosts", "python"}, "slurm of the config has no effect"),
    ],
)
def test_what_is_for_another_engine_is_left_out(given: dict[str, Any], names: set[str], idle: str) -> None:
    with pytest.warns(UserWarning, match=idle) as told:
        found = launch.arguments_beside(BOTH, given)
    assert found.values.keys() == names and len(told) == 1


def test_what_the_call_says_itself_is_left_to_the_checks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = launch.arguments_beside(LaunchConfig(num_processes=2), {"engine": "slurm", "hosts": ["gpu1"]})
    assert found.values == {"num_processes": 2}


def test_hosts_have_no_use_for_the_number_of_nodes_of_a_job() -> None:
    both = LaunchConfig(hosts=("gpu1", "gpu2"), slurm=("partition=gpu",), num_machines=4, num_processes=8)
    with pytest.warns(UserWarning, match="of the config has no effect") as told:
        found = launch.arguments_beside(both, {"engine": "ssh"})
    assert found.values.keys() == {"hosts", "num_processes"}
    assert [str(each.message).split()[0] for each in told] == ["slurm", "num_nodes"]
    with pytest.warns(UserWarning, match="hosts of the config has no effect"):
        assert launch.arguments_beside(both, {"engine": "slurm"}).values["num_nodes"] == 4


OF_NODES = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "num_processes": 8}


def test_what_nodes_say_that_have_launches_of_their_own_is_left_out() -> None:
    with pytest.warns(UserWarning, match="has no effect") as told:
        found = launch.arguments_beside(LaunchConfig(**OF_NODES), {"hosts": ["gpu1", "gpu2"]})
    assert found.values == {"num_processes": 8}, "of all hosts together"
    assert [str(each.message) for each in told] == [
        f"{name} of the config has no effect: hosts says which machines"
        for name in ("num_nodes", "node_rank", "master_addr")
    ]
    with pytest.warns(UserWarning, match="SLURM says which node is which") as told:
        found = launch.arguments_beside(LaunchConfig(**OF_NODES), {"engine": "slurm"})
    assert found.values["num_nodes"] == 2 and len(told) == 2 and "node_rank" not in found.values


def test_a_session_leaves_it_out_too() -> None:
    defaults = dict.fromkeys(("hosts", "slurm", "python", "num_processes"))
    with pytest.warns(UserWarning, match="hosts of the config has no effect"):
        found = resolve_options({**defaults, "engine": "slurm", "num_nodes": 1}, {}, BOTH)
    assert found["slurm"] == {"partition": "gpu"} and not found["hosts"]
