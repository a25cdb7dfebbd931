"""Seeds and random states."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from notebook_accel.seeding import RNGType, set_seed, synchronize_rng_state, synchronize_rng_states
from tests.unit.multiprocess import run_ranks


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def _restore_random_states() -> Any:
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_set_seed_seeds_all_sources() -> None:
    set_seed(5)
    first = draw()
    set_seed(5)
    assert draw() == first
    set_seed(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_wrong_seeds_are_named() -> None:
    before = random.getstate()
    wrong: Any
    for wrong, error, reason in (
        ("x", TypeError, "seed='x': an integer is needed, not str"),
        (1.5, TypeError, "seed=1.5: an integer is needed"),
        (-1, ValueError, "seed=-1: at least 0 is needed"),
        (2**32, ValueError, "seed=4294967296: at most 4294967295 is needed"),
    ):
        with pytest.raises(error, match=reason):
            set_seed(wrong)
    assert random.getstate() == before, "nothing was seeded"


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # it is set by torch builds with CUDA
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_wrong_arguments(clean_runtime: None) -> None:
    with pytest.raises(ValueError, match=r"unknown, choose among torch, .*generator"):
        synchronize_rng_state("dice")
    with pytest.raises(ValueError, match="needs a generator"):
        synchronize_rng_state(RNGType.GENERATOR)


def ranks_seeding() -> dict[str, Any]:
    from notebook_accel.state import PartialState

    rank = PartialState(cpu=True).process_index
    seen: dict[str, Any] = {}
    set_seed(3, device_specific=True)
    seen["specific"] = draw()
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    seen["torch"] = torch.rand(()).item()
    seen["generator"] = torch.rand((), generator=generator).item()
    return seen


def test_two_processes() -> None:
    first, second = run_ranks(ranks_seeding)
    assert all(a != b for a, b in zip(first["specific"], second["specific"], strict=True))
    assert first["torch"] == second["torch"] and first["generator"] == second["generator"]
    assert first["generator"] == torch.rand((), generator=torch.Generator().manual_seed(0)).item()
