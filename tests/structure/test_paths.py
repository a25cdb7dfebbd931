"""What a user calls goes through few of our files, and seldom from one into another: see `paths` for how that counts.

At first `Accelerator()` went through 19 files with 33 switches (the first one of a process 24 and 60), `save_state`
through 25 with 283, a prepared loader through 10 with 52.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, LaunchConfig, notebook_launcher, runtime
from notebook_accel.launch import preflight
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.widgets import ConfigForm
from tests.structure import paths
from tests.structure.paths import trace


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call and its limits.

    Attributes:
        name: of the test.
        make: returns the call; gets a folder for files. The test warms it up by a call that does not count.
        until: where counting stops, None for the end of the call.
        threads: count threads too that start meanwhile.
        files: of ours that may be entered.
        switches: calls from one of them into another.
    """

    name: str
    make: Callable[[Path], Callable[[], Any]]
    until: Callable[..., Any] | None = None
    threads: bool = False
    files: int
    switches: int


def make_parts() -> tuple[Any, ...]:
    """Return model, optimizer, loader and scheduler."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.zeros(12, 3)), batch_size=2, shuffle=True)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def construct_first(folder: Path) -> Callable[[], Any]:
    def construct() -> Accelerator:
        runtime.reset()
        return Accelerator()

    return construct


def construct_another(folder: Path) -> Callable[[], Any]:
    return Accelerator


def save_state(folder: Path) -> Callable[[], Any]:
    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*make_parts())
    for (batch,) in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
    numbers = itertools.count()
    return lambda: accelerator.save_state(folder / f"state-{next(numbers)}")


def prepare_loader(folder: Path) -> Callable[[], Any]:
    accelerator = Accelerator()
    return lambda: list(accelerator.prepare(make_parts()[2]))


def launch(folder: Path) -> Callable[[], Any]:
    runtime.runs().clear()  # an earlier one may have failed, and its variables would be dropped on the way
    return lambda: notebook_launcher(os.getpid, num_processes=2, start_method="fresh", view="none")


def launch_from_form(folder: Path) -> Callable[[], Any]:
    return ConfigForm(LaunchConfig(num_processes=1, use_cpu=True), function=os.getpid).launch


ROWS = (
    Row(name="notebook_launcher to its engine", make=launch, until=LocalEngine.run, files=17, switches=41),
    Row(
        name="form.launch to preflight",
        make=launch_from_form,
        until=preflight.check,
        files=10,
        switches=20,
    ),
    # each value that an option class sets in its constructor is a switch
    Row(name="the first Accelerator()", make=construct_first, files=20, switches=64),
    Row(name="another Accelerator()", make=construct_another, files=12, switches=32),
    Row(name="save_state", make=save_state, threads=True, files=17, switches=96),
    Row(name="a prepared loader, iterated", make=prepare_loader, files=9, switches=52),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_call_stays_within_its_limits(row: Row, tmp_path: Path, clean_runtime: None) -> None:
    call = row.make(tmp_path)
    call()
    path = trace(call, until=row.until, threads=row.threads)
    assert path.num_files <= row.files and path.num_switches <= row.switches, str(path)


def test_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text(
        "import functools, two\n"
        "def generate():\n    yield from [1, 2, 3]\n"
        "def start():\n    list(generate())\n    functools.reduce(two.add, [1, 2, 3])\n    two.stop()\n    two.stop()\n"
    )
    (tmp_path / "two.py").write_text("def add(a, b):\n    return a + b\ndef stop():\n    add(1, 2)\n")
    monkeypatch.setattr(paths, "_OURS", f"{tmp_path}/")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    one: Any = importlib.import_module("one")
    path = trace(one.start)
    assert path.files == ("one.py", "two.py")
    assert path.switches == {("one.py", "two.py"): 4}, "reduce calls add twice"
    assert path.functions[("one.py", "generate")] == 1, "a generator that goes on is no call"
    assert path.functions[("two.py", "add")] == 4
    assert trace(one.start, until=one.two.stop).num_switches == 3
    with pytest.raises(ValueError, match="did not call"):
        trace(one.generate, until=one.two.stop)
