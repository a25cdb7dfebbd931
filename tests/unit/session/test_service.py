"""Variables that are pushed to a worker and pulled from it."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.session import service


def test_variables_are_pushed_and_pulled(worker: dict[str, Any]) -> None:
    service.push({"a": 1})
    assert service.pull("a") == 1
    with pytest.raises(NameError, match="no variable 'b' on this worker; there are: a"):
        service.pull("b")
