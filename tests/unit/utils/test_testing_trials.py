"""What ranks try of an Accelerator passes, and fails where something is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from notebook_accel import Accelerator
from notebook_accel.utils import testing_trials
from tests.unit.multiprocess import RankFailed, run_ranks

PROGRAMS = Path(testing_trials.__file__).parents[1] / "test_utils" / "scripts"


@pytest.mark.parametrize("size", [1, 3])
def test_all_passes(size: int) -> None:
    run_ranks(try_all, world_size=size)


def try_all() -> None:
    testing_trials.try_script()
    testing_trials.try_operations()
    testing_trials.try_gradient_sync()


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (testing_trials.try_script, "weights of one and of all processes differ"),
        (testing_trials.try_operations, "reduce by mean"),
        (testing_trials.try_gradient_sync, "gradients that were accumulated"),
    ],
)
def test_what_is_wrong_is_told(trial: Callable[[], None], said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        run_ranks(try_with_faults, trial)


def try_with_faults(trial: Callable[[], None]) -> None:
    def backward(self: Accelerator, loss: torch.Tensor) -> None:
        (3 * loss).backward()

    testing_trials.reduce = lambda tensor, how: tensor if how == "mean" else real(tensor, how)
    Accelerator.backward = backward  # type: ignore[method-assign,assignment]
    trial()


real = testing_trials.reduce


@pytest.mark.parametrize("program", ["test_ops", "test_script", "test_sync"])
def test_each_is_a_program(program: str) -> None:
    path = PROGRAMS / f"{program}.py"
    words = [sys.executable, str(path)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=240, check=False, cwd=PROGRAMS.parents[2]
    )
    assert done.returncode == 0, done.stderr
