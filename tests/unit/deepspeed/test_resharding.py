"""Runs by DeepSpeed that go on with another number of processes: as if nothing had happened."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.deepspeed import resuming
from tests.unit.deepspeed.resuming import BATCH, CASES, STEPS, WORLDS, Net, Points
from tests.unit.multiprocess import run_worlds

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

WITHIN = 1e-5  # relative: sums of float32 in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resharding")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[list[dict[str, Any]]]:
    """What all runs did, one after the other, by rank."""
    worlds = [(size, (str(folder), number)) for number, size in enumerate(WORLDS)]
    return run_worlds(["deepspeed"], resuming.do, worlds, timeout=200)


def of(found: list[list[dict[str, Any]]], name: str) -> list[list[Any]]:
    results = [[rank[name] for rank in run if name in rank] for run in found]
    failed = [result for run in results for result in run if isinstance(result, str)]
    assert not failed, "\n".join(failed)
    return results


def of_run(number: int, found: list[list[dict[str, Any]]], name: str) -> list[Any]:
    """Return what each rank of one run has done by this name."""
    results = of(found, name)[number]
    assert len(results) == WORLDS[number]
    return results


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_with_another_number_of_processes(
    found: list[list[dict[str, Any]]], case: str
) -> None:
    runs = [[rank[case] for rank in run] for run in of(found, "parts")]
    batches = [batch for run in runs for batch in run[0]["seen"]]
    assert sorted(number for batch in batches for number in batch) == list(range(len(Points()))), "each once"
    assert sorted(batches[0]) != list(range(BATCH)), "they are shuffled"
    model = Net()
    model.load_state_dict(runs[0][0]["weights"])
    optimizer = CASES[case][1](model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, resuming.decay)
    expected = []
    for batch in batches:
        x = Points().x[batch]
        loss = resuming.loss_of(model(x), x)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for run, start in zip(runs, range(0, len(expected), STEPS), strict=True):
        for rank in run:
            assert rank["losses"] == pytest.approx(expected[start : start + STEPS], rel=WITHIN)


def test_what_deepspeed_makes_itself_goes_on(found: list[list[dict[str, Any]]]) -> None:
    runs = of(found, "own")
    batches = [batch for run in runs for batch in run[0]["seen"]]
    assert sorted(number for batch in batches for number in batch) == list(range(len(Points()))), "each once"
    assert [run[0]["steps"] for run in runs] == [STEPS * (number + 1) for number in range(len(WORLDS))]
    rates = [run[0]["rate"][0] for run in runs]
    assert rates == pytest.approx([0.05 * (STEPS * (number + 1) - 1) / 8 for number in range(len(WORLDS))])
    assert not runs[-1][0]["rounded"], "weights are those in float32, not those of bfloat16"


def test_a_rank_that_cannot_save_is_told_to_all(found: list[list[dict[str, Any]]], folder: Path) -> None:
    for told in of_run(0, found, "fail"):
        for stage, text in zip((2, 3), told, strict=True):
            assert text == (
                f"CheckpointError: checkpoint {folder}/whole/{stage} was not written, what was there before is "
                f"untouched: rank 1: OSError: No space left on device"
            )


def test_what_cannot_be_shared_out_is_refused(found: list[list[dict[str, Any]]]) -> None:
    for told in of_run(1, found, "misfit"):
        assert told["three"].startswith("CheckpointError: ")
        assert "in the same order, because 'three' of the optimizer's state" in told["three"]
        for name in ("ZeRO 1", "ZeRO 3"):
            assert (
                "has 'first.bias' in group 1 of the optimizer, which has it in group 0"
                in told[f"{name}, groups"]
            )
            assert "has 2 groups of parameters, and the optimizer has 1" in told[f"{name}, fewer"]
            assert "rank_1_mp_rank_00_optim_states.pt: some of the bytes" in told[f"{name}, damaged"]


def test_as_many_processes_may_have_another_order(found: list[list[dict[str, Any]]]) -> None:
    """DeepSpeed gives each parameter the state of another one then."""
    expected = [rank["ZeRO 2"]["losses"] for rank in of_run(1, found, "parts")]
    for result in of_run(0, found, "order"):
        assert result["losses"] == pytest.approx(expected[0], rel=WITHIN)
        assert "has 'first.bias' in group 1 of the optimizer, which has it in group 0" in result["groups"]
