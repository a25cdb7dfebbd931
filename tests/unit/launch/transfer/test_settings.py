"""The settings and random states that a worker starts with."""

from __future__ import annotations

import logging
import pickle
import warnings

import pytest
import torch

from notebook_accel.launch.transfer.settings import Settings


def test_generators_of_devices_get_the_seed_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    try:
        torch.manual_seed(41)
        torch.rand(3)
        states = Settings.capture()
        expected = torch.rand(3)
        torch.manual_seed(5)  # what a fresh process has is another one
        seeds: list[int] = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
        states.restore(forked=False)
        assert torch.equal(torch.rand(3), expected)
        assert seeds == [41], "the generators of GPUs start with it when CUDA is initialised"
    finally:
        torch.set_rng_state(before)


def test_filters_and_levels_that_other_processes_do_not_know() -> None:
    class OfCell(UserWarning): ...

    class Level(int): ...

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OfCell)
        warnings.filters.insert(0, ("error", None, (FutureWarning, BytesWarning), None, 0))  # type: ignore[arg-type, attr-defined]
        logging.getLogger("of a cell").setLevel(Level(7))
        try:
            settings = pickle.loads(pickle.dumps(Settings.capture()))
        finally:
            logging.getLogger("of a cell").setLevel(0)
        warnings.resetwarnings()
        settings._restore_warnings()
        assert [entry[::2] for entry in warnings.filters[:2]] == [
            ("error", FutureWarning, 0),
            ("error", BytesWarning, 0),
        ]
        assert settings.log_levels["of a cell"] == 7
