"""The tutorial about TPUs runs from top to bottom, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.test_tutorials import ROOT, execute

pytestmark = [pytest.mark.notebook, pytest.mark.slow]


@pytest.mark.may_leak(
    "temp_files", reason="a part of torch keeps a folder until its process ends, and kernels are killed"
)
def test_the_tutorial_runs(tmp_path: Path) -> None:
    source = ROOT / "tutorials" / "08_tpu.ipynb"
    done = execute(source, tmp_path / "executed.ipynb", "--show", "Test accuracy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Test accuracy: 9" in done.stdout.splitlines()[-2]
    for said in (
        "epoch 4 on xla",
        "caught: ",
        "SPMD: True",
        "SPMD: False",
        "the XLA runtime was initialised in this kernel",
    ):
        assert said in done.stdout, said
