"""A kernel for each engine that the contract is tried on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from notebook_accel.launch.engines.base import Engine
from tests.contract.engines import ENGINES, Tried
from tests.notebooks.kernel import Cell, Kernel, make_event_loop

IMPORTS = """
import os, signal, sys, time, torch
from notebook_accel import PartialState, notebook_launcher
torch.set_num_threads(1)  # OpenMP's threads would forbid a fork
"""


@dataclass
class Case:
    """An engine, and a kernel to launch in."""

    tried: Tried
    kernel: Kernel
    engine: Engine

    def launch(
        self, source: str, *, during: Callable[[], None] | None = None, then: str = "value", **more: Any
    ) -> Cell:
        """Run a cell that defines `f` and launches it as this engine does; the cell's value is that of `then`."""
        arguments = {**self.tried.arguments, **more}
        engine = self.tried.engine if self.tried.kind else repr(self.tried.engine)
        given = ", ".join([f"engine={engine}", *(f"{name}={value!r}" for name, value in arguments.items())])
        code = f"{source.strip()}\nvalue = notebook_launcher(f, {given})\n{then}"
        return self.kernel.run(code, timeout=self.tried.patience, during=during)

    @property
    def ranks(self) -> range:
        return range(self.tried.ranks)


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try each test on each engine that has what the test is about.

    That an engine refuses an argument is said by a test of its own.
    """
    if "case" not in metafunc.fixturenames:
        return
    asked = {name for mark in metafunc.definition.iter_markers("takes") for name in mark.args}
    need_workers = any(metafunc.definition.iter_markers("has_workers"))
    found = []
    for name, tried in ENGINES.items():
        is_there = importlib.util.find_spec(tried.needs) is not None  # otherwise its row is skipped
        engine = tried.find() if is_there else None
        if engine is None or (not asked & engine.refuses.keys() and engine.has_workers >= need_workers):
            marks = [pytest.mark.may_leak(kind, reason=reason) for kind, reason in tried.keeps.items()]
            found.append(pytest.param(name, marks=marks))
    metafunc.parametrize("case", found, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    tried = ENGINES[request.param]
    if importlib.util.find_spec(tried.needs) is None:
        pytest.skip(f"{tried.needs} is not installed")
    if reason := tried.obstacle():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("contract")
    with ExitStack() as stack:
        if tried.place is None:
            kernel = Kernel(folder, **tried.environment)
        else:
            kernel = stack.enter_context(tried.place(tmp_path_factory.mktemp("place"))).start_kernel(folder)
        stack.callback(kernel.close)
        kernel.run(f"{IMPORTS}\n{tried.prepare}", timeout=tried.patience).ok()
        yield Case(tried, kernel, tried.find())
