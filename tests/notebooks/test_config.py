"""A config written in one cell is what the next one launches by."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.once]


@pytest.mark.not_on("darwin", "kernels are not forked")
def test_a_launch_after_write_basic_config_forks(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    kernel.run("from notebook_accel import Accelerator, notebook_launcher, write_basic_config").ok()
    written = kernel.run(f"write_basic_config('bf16', {str(path)!r})").ok()
    assert str(path) in written.value
    kernel.run("def which(): return Accelerator().mixed_precision, Accelerator().num_processes").ok()
    cell = kernel.run(f"notebook_launcher(which, num_processes=2, config={str(path)!r})").ok()
    assert "(forked)" in cell.stdout and cell.value == "('bf16', 2)"


def test_a_wrong_config_starts_nothing(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("num_processes: 2\nmixed_precision: fp17\n")
    kernel.run("from notebook_accel import notebook_launcher").ok()
    cell = kernel.run(f"notebook_launcher(print, config={str(path)!r})")
    assert cell.error is not None and "wrong.yaml:2: mixed_precision 'fp17' is none of" in str(cell.error)
    assert "Launching" not in cell.stdout
