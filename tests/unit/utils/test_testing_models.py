"""The data and the model of small tests."""

from __future__ import annotations

import torch
from accelerate.test_utils import training as reference

from notebook_accel.utils.testing_models import RegressionDataset, RegressionModel


def test_the_points_are_accelerates() -> None:
    ours, theirs = RegressionDataset(length=5, seed=3), reference.RegressionDataset(length=5, seed=3)
    assert len(ours) == len(theirs) == ours.length == 5
    assert [ours[i] for i in range(5)] == [theirs[i] for i in range(5)]
    assert ours[1:3]["x"].tolist() == theirs[1:3]["x"].tolist()


def test_the_line_is_accelerates() -> None:
    ours, theirs = RegressionModel(a=2, b=3), reference.RegressionModel(a=2, b=3)
    x = torch.arange(4.0)
    assert torch.equal(ours(x), theirs(x))
    assert ours.state_dict() == theirs.state_dict()
    assert ours.first_batch is theirs.first_batch is False
