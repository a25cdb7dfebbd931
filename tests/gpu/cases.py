"""Runs many cases in one launch: functions that all ranks call, on GPUs or, to try them without one, on CPUs.

A case is a function of a module such as `collective_cases`, decorated with `case`. It makes an Accelerator, uses its
device and asserts. What it raises in a rank is its failure. The launch ends then, and the cases after it get another.
"""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from notebook_accel import Accelerator, devices, notebook_launcher
from notebook_accel.state import AcceleratorState, PartialState

HANG_SECONDS = 60.0  # a compiler takes long, without a word
Function = Callable[[Path], None]


class Unavailable(Exception):
    """The machine lacks what the case needs; raised by all ranks."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a case needs.

    Attributes:
        ranks: the least number of them.
        most: the largest number.
        cuda: whether it says nothing on CPUs.
    """

    ranks: int = 1
    most: int = 2
    cuda: bool = False

    def missing(self, kind: str, count: int) -> str:
        """Return why the case cannot run, empty if it can.

        Args:
            kind: of the machine's devices.
            count: of these.
        """
        if self.cuda and kind != "cuda":
            return "needs CUDA"
        if count < self.ranks:
            return f"needs {self.ranks} CUDA devices, this machine has {count}"
        return ""


def case(**needs: Any) -> Callable[[Function], Function]:
    """Mark a function as a case that needs this."""

    def mark(function: Function) -> Function:
        function.needs = Needs(**needs)  # type: ignore[attr-defined]
        return function

    return mark


def list_cases(module: str) -> dict[str, Needs]:
    """Return what each case of a module of this folder needs, by name."""
    found = vars(importlib.import_module(f"tests.gpu.{module}"))
    return {name: value.needs for name, value in found.items() if hasattr(value, "needs")}


def make(**options: Any) -> Accelerator:
    """Return an accelerator that takes nothing over from the one before it."""
    AcceleratorState._reset_state()
    return Accelerator(**options)


def expect_close(found: Any, expected: Any, relative: float = 1e-3) -> None:
    """Compare losses of two ways to compute the same."""
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=relative,
        atol=1e-6,
    )


def run_all(module: str, names: list[str], folder: str) -> None:
    """Run cases one after the other, in a worker; a file for each and each rank says how it went."""
    for name in names:
        state = PartialState()
        torch.manual_seed(0)
        mark = Path(folder) / f"{name}.{state.process_index}"
        place = Path(folder) / f"{name}.files"
        place.mkdir(exist_ok=True)
        try:
            getattr(importlib.import_module(f"tests.gpu.{module}"), name)(place)
            text = "passed"
        except Unavailable as reason:
            text = f"skipped: {reason}"
        AcceleratorState._reset_state()
        PartialState().wait_for_everyone()
        gc.collect()
        devices.empty_cache(PartialState().device)
        mark.write_text(text, encoding="utf-8")


class Outcomes:
    """How the cases of each module went; a module's cases run when the first of them is asked for.

    Args:
        kind: of devices, `cuda` or `cpu`.
        count: of these.
        folder: for files of the cases.
    """

    def __init__(self, kind: str, count: int, folder: Path) -> None:
        self._kind = kind
        self._count = count
        self._folder = folder
        self._found: dict[tuple[str, str], str] = {}

    def of(self, module: str, name: str) -> str:
        """Return `passed`, `skipped: ` and a reason, or a traceback."""
        if (module, name) not in self._found:
            self._run(module)
        return self._found[module, name]

    def _run(self, module: str) -> None:
        by_size: dict[int, list[str]] = {}
        for name, needs in list_cases(module).items():
            if reason := needs.missing(self._kind, self._count):
                self._found[module, name] = f"skipped: {reason}"
            else:
                by_size.setdefault(min(self._count, needs.most), []).append(name)
        for size, names in by_size.items():
            while names:
                names = self._launch(module, names, size)

    def _launch(self, module: str, names: list[str], size: int) -> list[str]:
        """Run cases up to the first that fails, and return those that did not run."""
        folder = self._folder / f"{module}-{size}-{len(names)}"
        folder.mkdir()
        error = ""
        try:
            run = notebook_launcher(
                run_all,
                (module, names, str(folder)),
                num_processes=size,
                start_method="fresh",
                environment={"ACCELERATE_USE_CPU": "1"} if self._kind == "cpu" else {},
                hang_timeout=HANG_SECONDS,
                on_hang="raise",
                view="none",
                block=False,  # in processes of its own, also where it is one
            )
            run.result()
        except Exception:
            error = traceback.format_exc()
        for place, name in enumerate(names):
            marks = [folder / f"{name}.{rank}" for rank in range(size)]
            if not all(mark.is_file() for mark in marks):
                self._found[module, name] = error or "the launch ended without a word"
                return names[place + 1 :]
            self._found[module, name] = marks[0].read_text(encoding="utf-8")
        if error:  # all cases had passed
            self._found[module, names[-1]] = error
        return []
