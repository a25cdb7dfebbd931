"""Runs cases on fake devices: many in one launch of processes, which end with it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.ports import reserve_port
from tests.unit import fake_device, fake_group
from tests.unit.multiprocess import run_ranks

Case = Callable[[Path], None]
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def cases_of(namespace: dict[str, Any]) -> list[Case]:
    """Return the functions of a module whose names begin with `case_`, in its order."""
    return [
        value for name, value in namespace.items() if name.startswith("case_") and inspect.isfunction(value)
    ]


class Outcomes:
    """How cases ended.

    Args:
        failures: of each rank what each case raised, as text, by name; empty where it raised nothing.
    """

    def __init__(self, failures: list[dict[str, str]]) -> None:
        self.failures = failures

    def check(self, case: Case) -> None:
        """Fail where a rank failed in this case."""
        texts = [(rank, found[case.__name__]) for rank, found in enumerate(self.failures)]
        failed = [f"rank {rank}: {text}" for rank, text in texts if text]
        assert not failed, "\n".join(failed)


def run_cases(cases: Sequence[Case], folder: Path, *, world_size: int = 1, **options: Any) -> Outcomes:
    """Run cases one after the other in fresh processes that have fake devices.

    Each case starts without a runtime and without a process group.

    Args:
        cases: functions at the top of a module. Each gets a folder of its own, which its ranks share.
        folder: for those.
        world_size: number of processes. A single one is by itself, as a notebook is.
        options: of `fake_device.install`.
    """
    for case in cases:
        (folder / case.__name__).mkdir(parents=True)
    environment = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    with contextlib.ExitStack() as reserved:
        ports = [reserved.enter_context(reserve_port()) for _ in cases]
        arguments = (list(cases), ports, folder, options)
        return Outcomes(
            run_ranks(_run, *arguments, world_size=world_size, environment=environment, timeout=240)
        )


def _run(cases: list[Case], ports: list[int], folder: Path, options: dict[str, Any]) -> dict[str, str]:
    if os.environ["WORLD_SIZE"] == "1":
        for name in _OF_RANKS:
            del os.environ[name]
    fake_group.install(fake_device.install(**options))
    found = {}
    for case, port in zip(cases, ports, strict=True):
        if "WORLD_SIZE" in os.environ:
            os.environ["MASTER_PORT"] = str(port)
        try:
            case(folder / case.__name__)
            found[case.__name__] = ""
        except BaseException:  # those of pytest too
            found[case.__name__] = traceback.format_exc()
        _start_over()
    return found


def _start_over() -> None:
    from notebook_accel import runtime

    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    runtime.reset()
