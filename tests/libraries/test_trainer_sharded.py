"""Trainer over FSDP, DeepSpeed and meshes: it trains as without them, saves, and goes on in the middle.

Accelerate spreads no model over CPUs, so these runs are compared with plain ones, which `test_trainer_same` compares
with those of Accelerate.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.libraries import sides
from tests.libraries.trainer.launching import Results, launch

sides.skip_without("transformers", "deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARDED, DEEPSPEED = "sharded_cases", "deepspeed_cases"
PLAIN_OF = {
    "fsdp_accumulated": "plain_accumulated",
    "fsdp_bf16": "plain_bf16",
    "stage_2": "plain_accumulated",
}
OTHERS = {"fsdp_language_model", "fsdp_smaller_batches", "fsdp_twice", "fsdp_evaluated"}
OTHERS |= {"sharded_by_mesh", "replicated_by_mesh"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two processes found."""
    return launch(tmp_path_factory.mktemp("sharded"), 2, SHARDED, DEEPSPEED)


def list_losses(case: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in case["log"] if "loss" in entry]


def list_values(case: dict[str, Any]) -> list[list[float]]:
    """Return loss, norm and rate of each step, and the losses of evaluations."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[entry[name] for name in names if name in entry] for entry in case["log"]]


def check_weights(found: dict[str, Any], expected: dict[str, Any], close: float) -> None:
    """Compare names, shapes and sums of weights."""
    assert found.keys() == expected.keys()
    for name, (shape, _, total) in expected.items():
        assert found[name][0] == shape, name
        assert found[name][2] == pytest.approx(total, rel=close, abs=max(close, 1e-3)), name


def test_all_cases_end(done: Results) -> None:
    for rank in done:
        errors = {
            name: case["where"] for cases in rank.values() for name, case in cases.items() if "where" in case
        }
        assert errors.keys() == {"wrong_values", "split_sequences"}, errors
        assert (
            "train_micro_batch_size_per_gpu=7 vs hf per_device_train_batch_size=4" in errors["wrong_values"]
        )
        refusal = "sp_size above 1 with any strategy (sp 2): DeepSpeed's sequence parallel (Ulysses, ALST)"
        assert f"NotImplementedError: {refusal} is not supported" in errors["split_sequences"]


def test_fsdp_trains_as_a_plain_model(done: Results) -> None:
    for rank in done:
        cases = {name: case["found"] for name, case in rank[SHARDED].items()}
        for name in cases.keys() - OTHERS:
            if name.startswith("plain"):
                continue
            found, plain = cases[name], cases[PLAIN_OF.get(name, "plain")]
            close = 2e-2 if "bf16" in name else 1e-4
            for ours, theirs in zip(list_values(found), list_values(plain), strict=True):
                assert ours == pytest.approx(theirs, rel=close), name
            assert found["type"] == "DistributedType.FSDP" and found["wrapped"].startswith("FSDP"), name
            if "shards" not in name:
                check_weights(found["saved"], plain["saved"], close)
            if "again" in found:
                assert list_losses(found["again"]) == pytest.approx(list_losses(found), rel=close), name
        files = cases["fsdp_of_shards"]["files"]
        assert {"checkpoint-3/optimizer_0/.metadata", "checkpoint-3/pytorch_model_fsdp_0/.metadata"} <= set(
            files
        )
        assert {"checkpoint-3/optimizer.bin", "checkpoint-3/pytorch_model_fsdp.bin"} <= set(
            cases["fsdp"]["files"]
        )


def test_other_ways_to_spread(done: Results) -> None:
    for rank in done:
        cases = {name: case["found"] for name, case in rank[SHARDED].items()}
        assert cases["sharded_by_mesh"]["wrapped"].startswith("FSDP")
        assert list_losses(cases["sharded_by_mesh"]) == pytest.approx(
            list_losses(cases["replicated_by_mesh"]), rel=1e-4
        )
        language = cases["fsdp_language_model"]
        assert list_losses(language["again"]) == pytest.approx(list_losses(language), rel=1e-4)
        assert cases["fsdp_smaller_batches"]["sizes"][0] == 3
        assert cases["fsdp_smaller_batches"]["sizes"][-1] == 2
        assert cases["fsdp_twice"]["second"]["step"] == 2
        assert len(cases["fsdp_evaluated"]["predicted"]) == 5


def test_deepspeed_trains_as_a_plain_model(done: Results) -> None:
    for rank in done:
        cases = {name: case["found"] for name, case in rank[DEEPSPEED].items() if "found" in case}
        plain = cases["plain"]
        for name in (
            "stage_0",
            "stage_1",
            "stage_2",
            "stage_3",
            "stage_3_not_gathered",
            "best",
            "activations",
        ):
            found, whole = cases[name], cases[PLAIN_OF.get(name, "plain")]
            for ours, theirs in zip(list_values(found), list_values(whole), strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4), name
        for name, found in cases.items():
            if "again" in found and not name.startswith("plain"):
                assert found["engine"] == "DeepSpeedEngine", name
                assert list_losses(found["again"]) == pytest.approx(list_losses(found), rel=1e-4), name
        for name in ("guide_2", "guide_3"):
            assert list_losses(cases[name]) == pytest.approx(list_losses(cases["plain_guided"]), rel=1e-4), (
                name
            )
            assert cases[name]["optimizer"] == "DeepSpeedOptimizerWrapper"
            rates = [entry["learning_rate"] for entry in cases[name]["log"] if "learning_rate" in entry]
            assert rates == pytest.approx([0, 2e-3 * math.log(2) / math.log(3), *(2e-3,) * 3]), name
        assert cases["optimizer_and_schedule"]["scheduler"] == "DeepSpeedSchedulerWrapper"
        assert list_losses(cases["bf16"]) == pytest.approx(list_losses(plain), rel=2e-2)
        assert cases["stage_3"]["config"]["zero_optimization"]["reduce_bucket_size"] == 16 * 16
        assert cases["stage_2"]["config"]["gradient_accumulation_steps"] == 2
        assert cases["smaller_batches"]["sizes"][-1] == 2
        assert cases["config_first"] == {"seen": [True, True, False, False, 3, False, True], "after": False}


def test_one_trainer_trains_by_deepspeed_several_times(done: Results) -> None:
    for rank in done:
        cases = {name: case["found"] for name, case in rank[DEEPSPEED].items() if "found" in case}
        plain = cases["plain_again"]
        for name in ("again_2", "again_3"):
            found = cases[name]
            assert found["kinds"] == ["DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "LambdaLR"]
            for ours, theirs in zip(found["logs"], plain["logs"], strict=True):
                assert list_losses({"log": ours}) == pytest.approx(list_losses({"log": theirs}), rel=1e-4)
            losses = [entry[0]["eval_loss"] for entry in found["evaluated"]]
            assert losses[-3:] == pytest.approx([entry[0]["eval_loss"] for entry in plain["evaluated"]])
        configured = cases["again_by_config"]
        assert configured["kinds"][-1] == "DeepSpeedSchedulerWrapper"
        rates = [
            [entry["learning_rate"] for entry in log if "learning_rate" in entry]
            for log in configured["logs"]
        ]
        assert rates[0] == rates[1] == [0, 1e-2, 1e-2], "the schedule begins anew"
        hooks = {name: case["hooks"] for name, case in cases.items() if "hooks" in case}
        assert hooks["again_2"] == hooks["again_by_config"] == 1, "an engine that was released leaves none"
        two = cases["two_trainers"]
        assert list_losses({"log": two["second"]})[0] != list_losses({"log": two["found"][0][1]})[0]


def test_a_model_that_transformers_split(tmp_path: Path) -> None:
    """The processes of a split model get the same batches, and train it as if it were whole."""
    for rank in launch(tmp_path, 2, "split_cases"):
        cases = {name: case["found"] for name, case in rank["split_cases"].items()}
        for name in ("", "_accumulated"):
            split, whole = cases[f"split{name}"], cases[f"whole{name}"]
            assert split["wrapped"] == "LlamaForCausalLM"
            for ours, theirs in zip(list_values(split), list_values(whole), strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4), name
            check_weights(split["saved"], whole["saved"], 1e-4)
            assert split["files"] == whole["files"]
        split, whole = cases["own_loop"]["split"], cases["own_loop"]["whole"]
        assert split["kind"] == "LlamaForCausalLM"
        for ours, theirs in zip(split["rows"], whole["rows"], strict=True):
            assert ours[:2] == pytest.approx(theirs[:2], rel=1e-4)
            assert set(theirs[2]) < set(ours[2])
