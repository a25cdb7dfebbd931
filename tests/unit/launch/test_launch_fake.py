"""Launches on an accelerator of which the package has no row."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit import fake_launches

SCRIPT = """
import json
import torch
from notebook_accel import Accelerator, notebook_launcher
from notebook_accel.utils import gather_object, set_seed


def work():
    accelerator = Accelerator()
    drawn = torch.rand(1, device=accelerator.device).item()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
    optimizer.step()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device)).item()
    current = torch.fake.current_device()
    return gather_object([[str(accelerator.device), current, total, drawn]])


def refusal(**options):
    try:
        notebook_launcher(work, (), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    set_seed(7)
    found = {"forked": notebook_launcher(work, ())}
    found["not_started_here"] = not torch.fake.is_initialized()
    found["many"] = refusal(num_processes=3)
    expected = torch.rand(1, device="fake:0").item()
    found["fork_after_use"] = refusal(start_method="fork")
    set_seed(7)
    found["fresh"] = notebook_launcher(work, ())
    found["alone"] = notebook_launcher(work, (), num_processes=1)
    found["expected"] = expected
    print()
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = fake_launches.run_script(tmp_path_factory.mktemp("launch"), SCRIPT)
    return result


def test_a_process_for_each_device(found: dict[str, Any]) -> None:
    assert [row[:3] for row in found["forked"]] == [["fake:0", 0, 2.0], ["fake:1", 1, 2.0]]
    assert found["not_started_here"], "the launcher counts devices and starts none"
    assert [row[:3] for row in found["alone"]] == [["fake:0", 0, 1.0]]


def test_more_processes_than_devices(found: dict[str, Any]) -> None:
    assert "this machine has 2 fake devices, so at most 2 is possible" in found["many"]


def test_no_fork_after_the_devices_were_started(found: dict[str, Any]) -> None:
    assert "FAKE was initialised" in found["fork_after_use"]
    assert [row[:3] for row in found["fresh"]] == [["fake:0", 0, 2.0], ["fake:1", 1, 2.0]]


def test_the_seed_of_the_cell_is_that_of_the_devices(found: dict[str, Any]) -> None:
    assert [row[3] for row in found["forked"]] == [found["expected"]] * 2
    assert [row[3] for row in found["fresh"]] == [found["expected"]] * 2
