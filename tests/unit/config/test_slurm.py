"""What `slurm=` may be, as an argument, a flag and in a file."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.config.slurm import check_slurm, normalize, parse_pairs, read_pairs


def test_flags_and_files_say_the_same() -> None:
    options = {"partition": "gpu", "gres": "gpu:4,x=1", "exclusive": True}
    assert parse_pairs(["partition=gpu", "gres=gpu:4,x=1", "exclusive"]) == options
    assert read_pairs(options) == ["partition=gpu", "gres=gpu:4,x=1", "exclusive"]
    assert read_pairs(["a=b"]) == ["a=b"]


def test_names_may_have_dashes() -> None:
    assert normalize({"gpus-per-node": 4, "exclusive": False, "qos": None}) == {"gpus_per_node": 4}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("gpu", "slurm='gpu': a dict of sbatch's options is needed"),
        ({1: "gpu"}, "slurm has 1: names are those of sbatch's options"),
        ({"--time": "1"}, "slurm has '--time': names are those"),
        ({"time": [1]}, "slurm has [1] for 'time': a text, a number, or True"),
        ({"time": "1\n#SBATCH --x"}, "for 'time': a text in one line is needed"),
        ({"gpus": 8}, "slurm has 'gpus': gpus_per_node= says it for each node"),
        ({"clusters": "b"}, "slurm has 'clusters': the job runs on the cluster that"),
        ({"ntasks-per-node": 3}, "slurm has 'ntasks-per-node': num_processes= says it"),
    ],
)
def test_wrong_options_are_named(options: Any, text: str) -> None:
    (problem,) = check_slurm("slurm", options)
    assert text in str(problem)


def test_good_options() -> None:
    assert not list(check_slurm("slurm", None)) and not list(
        check_slurm("slurm", {"time": 5, "exclusive": True})
    )
