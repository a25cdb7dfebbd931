"""What is left of a loader whose loop ended early: nothing, also while somebody keeps the error, as a notebook does."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loader

from notebook_accel.data_loader import prepare_data_loader
from notebook_accel.gradient_state import GradientState

pytestmark = pytest.mark.usefixtures("clean_runtime")


def test_a_loop_that_is_left_keeps_no_loader() -> None:
    """Its batches may be large: no garbage collection is needed to free them."""
    loader = prepare_data_loader(DataLoader(list(range(16)), batch_size=4))
    assert isinstance(loader.gradient_state, GradientState)
    for _ in loader:
        break
    found = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts this process's descriptors")
@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_an_interrupt_while_loader_processes_start_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    loader = prepare_data_loader(DataLoader(list(range(16)), batch_size=4, num_workers=2))
    assert len(list(loader)) == 4  # opens what multiprocessing keeps
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(torch_loader._MultiProcessingDataLoaderIter, "_try_put_index", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            next(iter(loader))
    assert kept.tb is not None and len(os.listdir("/proc/self/fd")) == before
    assert len(list(loader)) == 4
