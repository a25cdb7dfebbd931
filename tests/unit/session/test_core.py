"""Arguments of a session are checked before its workers start."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel import Session
from notebook_accel.config.schema import LaunchConfig


@pytest.mark.parametrize("config", [None, LaunchConfig(use_cpu=True)])
@pytest.mark.parametrize("environment", [3, {"ACCELERATE_USE_CPU": 1}])
def test_an_environment_that_is_none_is_named(environment: Any, config: LaunchConfig | None) -> None:
    with pytest.raises(
        TypeError, match=r"environment=.*: a dict is needed, its names and values are strings"
    ):
        Session(environment=environment, config=config)
