"""Training on devices of torch_xla that are CPUs: one device in a process, and one program over four."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.xla.worker import Worker

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process with one device, in which sums over ranks are compiled though there is one."""
    worker = Worker(tmp_path_factory.mktemp("one"), 1, XLA_ALWAYS_ALLREDUCE="1")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process whose program runs on four devices."""
    worker = Worker(tmp_path_factory.mktemp("four"), 4, NOTEBOOK_ACCEL_TPU_MODE="spmd")
    yield worker
    worker.close()


@pytest.fixture(scope="module", params=["one", "four"])
def worker(request: pytest.FixtureRequest) -> Worker:
    """Each of them."""
    found: Worker = request.getfixturevalue(request.param)
    return found


def test_place(worker: Worker) -> None:
    assert worker.call("place") == {
        "type": "XLA",
        "device": "xla:0",
        "processes": 1,
        "main": True,
        "backend": "xla",
        "strategy": "XlaDevice",
    }


def test_digits_are_learnt_as_on_the_cpu(worker: Worker) -> None:
    found = worker.call("digits")
    assert found["split"] == ("" if worker.devices == 1 else "{devices=[4,1,1,1]0,1,2,3}")
    assert len(found["losses"]) == 30
    assert found["losses"] == pytest.approx(found["expected"], abs=1e-4)
    assert found["weights"] == pytest.approx(found["expected_weights"], abs=1e-3)
    assert found["means"] == pytest.approx(found["expected_means"], abs=1e-4)
    assert found["truth"]
    assert found["same_answers"] >= found["tested"] - 1  # of a tie between two digits
    (advice,) = found["advice"]
    assert "shape [45, 1, 8, 8] comes after one of shape [48, 1, 8, 8]" in advice
    assert "drop_last=True" in advice


@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulation_clipping_and_schedule(worker: Worker, clip: float | None) -> None:
    found = worker.call("accumulation", clip)
    assert found["losses"] == pytest.approx(found["expected"], abs=1e-5)
    assert found["weights"] == pytest.approx(found["expected_weights"], abs=1e-5)
    assert found["rates"] == pytest.approx(found["expected_rates"])
    assert found["steps"] == 6


def test_clipped_gradients(worker: Worker) -> None:
    found = worker.call("clipping")
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)
    assert found["clipped"] == pytest.approx(found["expected"], abs=1e-7)
    assert found["flags"] == [False, True, False]
    assert found["largest"] == pytest.approx(1e-4)


def test_bfloat16(worker: Worker) -> None:
    found = worker.call("bfloat16")
    assert found["inside"] == ["torch.bfloat16"]
    assert (found["outside"], found["weights"]) == ("torch.float32", "torch.float32")
    assert found["losses"] == pytest.approx(found["expected"], rel=0.03)
    assert found["losses"] != pytest.approx(found["expected"], rel=1e-6)


def test_tied_weights_stay_tied(worker: Worker, tmp_path: Path) -> None:
    found = worker.call("tied_weights", str(tmp_path))
    assert found["tied"] and found["same_object"] and found["followed"] and found["whole"]
    assert found["losses"] == pytest.approx(found["expected"], abs=1e-5)
    assert found["weights"] == pytest.approx(found["expected_weights"], abs=1e-4)
    assert found["devices"] == ["cpu"]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_checkpoint_goes_on_where_it_was_saved(worker: Worker, tmp_path: Path, async_save: bool) -> None:
    found = worker.call("checkpoint", str(tmp_path / "saved"), async_save)
    assert found["loaded"] == found["saved"] == found["on_cpu"]
    assert found["resumed"] == pytest.approx(found["went_on"], abs=1e-6)
    assert found["devices"] == ["cpu"]
    assert found["momentum"] == 4 and found["average"]


def test_a_batch_is_one_program_and_compiled_once(worker: Worker) -> None:
    (compiled, _), *others = worker.call("programs_of_epochs")
    assert compiled <= 6
    assert others == [[0, 5], [0, 5]]  # batches, though learning rate and step count change


def test_seeds_reach_the_device(worker: Worker) -> None:
    found = worker.call("random_numbers")
    assert found["first"] == found["again"] != found["other"]
    assert found["other"] == found["other_again"]


def test_processes_that_read(worker: Worker) -> None:
    assert worker.call("workers") == {"ends": [False] * 4 + [True], "same": True, "dispatched": True}


def test_optimizers_follow_their_parameters_to_the_device(one: Worker) -> None:
    assert one.call("one_by_one") == {"changed": [True, True]}


def test_the_last_batch_of_several_ranks_is_cut(one: Worker) -> None:
    found = one.call("several_ranks")
    assert found["sizes"] == [4, 4]
    assert found["kept"] == [[8, 8], [5, 5]]
    assert found["norm"] > 0
    assert found["averaged"] == [True, False, True]
    assert found["stream"] == [[0, 1, 2], [6, 7, 8], [12, 0, 1]]
    assert found["objects"] == [1, 2, 1, 2]
    assert found["trigger"] is True


def test_trees_travel_as_on_the_cpu(one: Worker) -> None:
    assert one.call("collectives") == {"wrong": [], "objects": True, "not a number": [True, True]}


def test_refusals(one: Worker) -> None:
    fp16, no_downcast, mode, world = one.call("refusals")
    assert "XLA devices with mixed_precision='fp16'" in fp16
    assert "downcast_bf16 with another mixed_precision than 'bf16' ('no')" in no_downcast
    assert "NOTEBOOK_ACCEL_TPU_MODE='other': choose process or spmd" in mode
    assert "WORLD_SIZE is 2, but torch_xla joins 1 device(s)" in world


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A process with two devices, for a thread each, that store float32 as bfloat16."""
    worker = Worker(tmp_path_factory.mktemp("two"), 2, ACCELERATE_DOWNCAST_BF16="1")
    yield worker
    worker.close()


def test_downcast_stores_less(two: Worker) -> None:
    found = two.call("downcast")
    assert found["single"] == 3.0
    assert found["double"] == pytest.approx(3.003, abs=1e-4)
    assert found["dtypes"] == ["torch.float32", "torch.float64"]


def test_threads_have_their_own_state(two: Worker) -> None:
    found = two.call("threads")
    first, second = found["ranks"]
    assert (first["place"], second["place"]) == ([0, 2, True], [1, 2, False])
    assert (first["device"], second["device"]) == ("xla:0", "xla:1")
    assert (first["steps"], second["steps"]) == (1, 2)
    assert (first["batches"], second["batches"]) == ([[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]])
    assert first["own"] and second["own"]
    assert (first["left"], second["left"]) == (False, True)
    assert not found["outside"]
