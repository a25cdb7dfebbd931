"""Tests that need a CUDA device.

The environment variable GPU_TESTS_ON_CPU tries their logic without one: its value is the number of CPU processes that
take the place of devices. What says nothing on CPUs is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.gpu.cases import Outcomes
from tests.notebooks.kernel import Kernel, make_event_loop

IMPORTS = "import os, torch\nfrom notebook_accel import Accelerator, debug_launcher, notebook_launcher"


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that the tests use.

    Attributes:
        kind: `cuda`, or `cpu` where CPU processes take their place.
        count: of these.
    """

    kind: str
    count: int

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of a kernel."""
        return {} if self.kind == "cuda" else {"ACCELERATE_USE_CPU": "1"}

    def require(self, count: int) -> None:
        """Skip the test where there are fewer devices."""
        if self.count < count:
            pytest.skip(f"needs {count} CUDA devices, this machine has {self.count}")


def _find_machine() -> Machine:
    on_cpu = int(os.environ.get("GPU_TESTS_ON_CPU", "0"))
    if on_cpu:
        return Machine(kind="cpu", count=on_cpu)
    return Machine(kind="cuda", count=torch.cuda.device_count())


@pytest.fixture(scope="session", autouse=True)
def _started_cuda() -> None:
    """The driver stays open in this process once a test has used it: what it opens is no leak of that test."""
    if _find_machine().kind == "cuda" and torch.cuda.is_available():
        torch.ones(1, device="cuda").sum().item()


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The devices of this machine."""
    return _find_machine()


@pytest.fixture(scope="session")
def outcomes(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """How the cases of this folder went."""
    return Outcomes(machine.kind, machine.count, tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="session")
def on_gpu(machine: Machine) -> None:
    """The test says nothing on CPUs."""
    if machine.kind != "cuda":
        pytest.skip("needs CUDA")


@pytest.fixture
def kernel(tmp_path: Path, machine: Machine) -> Iterator[Kernel]:
    """A kernel of the test's own, with the usual imports done."""
    started = Kernel(tmp_path, **machine.variables)
    started.run(IMPORTS).ok()
    yield started
    started.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Iterator[Kernel]:
    """A kernel for the tests of a module, with the usual imports done."""
    started = Kernel(tmp_path_factory.mktemp("kernel"), **machine.variables)
    started.run(IMPORTS).ok()
    yield started
    started.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; pytest hands over those of all folders."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if _find_machine().count == 0:
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
