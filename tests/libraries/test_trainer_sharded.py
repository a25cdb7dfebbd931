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
BY_DEEPSPEED = ("stage_0", "stage_1", "stage_2", "stage_3", "stage_3_not_gathered")
BY_DEEPSPEED += ("best", "activations")
OTHERS = {"fsdp_language_model", "fsdp_smaller_batches", "fsdp_twice", "fsdp_evaluated"}
OTHERS |= {"sharded_by_mesh", "replicated_by_mesh"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two processes found."""
    return launch(tmp_path_factory.mktemp("sharded"), 2, SHARDED, DEEPSPEED)


def list_losses(case: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in case["log"] if "loss" in entry]


def list_rates(case: dict[str, Any]) -> list[float]:
    return [entry["learning_rate"] for entry in case["log"] if "learning_rate" in entry]


def list_values(case: dict[str, Any]) -> list[list[float]]:
    """Return loss, norm and rate of each step, and the losses of evaluations."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[entry[name] for name in names if name in entry] for entry in case["log"]]


def check_the_end(found: dict[str, Any], expected: dict[str, Any], close: float) -> None:
    """Compare the losses of the evaluation at the end, and what was saved."""
    for ours, theirs in zip(found["evaluated"], expected["evaluated"], strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=close)
    check_weights(found["saved"], expected["saved"], close)


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
                check_the_end(found, plain, close)
            if "again" in found:
                assert found["next"] == plain["next"], name
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
        for name in BY_DEEPSPEED:
            found, whole = cases[name], cases[PLAIN_OF.get(name, "plain")]
            for ours, theirs in zip(list_values(found), list_values(whole), strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4), name
            check_the_end(found, whole, 1e-4)
            if "again" in found:
                assert found["next"] == whole["next"], name
        for name, found in cases.items():
            if "zero3" in found:
                assert found["zero3"] == (name in {"stage_3", "stage_3_not_gathered", "guide_3", "by_file"})
                assert found["skipped"] is False
                for weight, (shape, _, total) in found["saved"].items():
                    assert math.prod(shape) and (total != 0 or len(shape) == 1), (name, weight)
            if "again" in found and not name.startswith("plain"):
                assert found["engine"] == "DeepSpeedEngine", name
                assert list_losses(found["again"]) == pytest.approx(list_losses(found), rel=1e-4), name
        for name in ("guide_2", "guide_3"):
            assert list_losses(cases[name]) == pytest.approx(list_losses(cases["plain_guided"]), rel=1e-4), (
                name
            )
            check_the_end(cases[name], cases["plain_guided"], 1e-4)
            assert cases[name]["optimizer"] == "DeepSpeedOptimizerWrapper"
            assert list_rates(cases[name]) == pytest.approx(
                [0, 2e-3 * math.log(2) / math.log(3), *(2e-3,) * 3]
            ), name
        ours, theirs = cases["schedule_of_ours"], cases["plain_cosine"]
        assert list_losses(ours) == pytest.approx(list_losses(theirs), rel=1e-4)
        check_the_end(ours, theirs, 1e-4)
        # the engine steps the schedule before Trainer logs
        assert list_rates(ours)[:-1] == pytest.approx(list_rates(theirs)[1:], rel=1e-6)
        assert cases["optimizer_and_schedule"]["scheduler"] == "DeepSpeedSchedulerWrapper"
        assert list_losses(cases["bf16"]) == pytest.approx(list_losses(plain), rel=2e-2)
        assert cases["stage_3"]["config"]["zero_optimization"]["reduce_bucket_size"] == 16 * 16
        assert cases["stage_2"]["config"]["gradient_accumulation_steps"] == 2
        assert cases["smaller_batches"]["sizes"][-1] == 2
        assert cases["plugin"] == {"stage": 3, "auto": True, "three": True}
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
        rates = [list_rates({"log": log}) for log in configured["logs"]]
        assert rates[0] == rates[1] == [0, 1e-2, 1e-2], "the schedule begins anew"
        hooks = {name: case["hooks"] for name, case in cases.items() if "hooks" in case}
        assert hooks["again_2"] == hooks["again_by_config"] == 1, "an engine that was released leaves none"
        two, plain = cases["two_trainers"], cases["plain_two_trainers"]
        logs = [two["second"], *(log for found in two["found"] for log in found)]
        wanted = [plain["second"], *(log for found in plain["found"] for log in found)]
        for ours, theirs in zip(logs, wanted, strict=True):
            for one, other in zip(list_values({"log": ours}), list_values({"log": theirs}), strict=True):
                assert one == pytest.approx(other, rel=1e-4)
        assert list_losses({"log": two["second"]})[0] < list_losses({"log": two["found"][0][1]})[0]


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
