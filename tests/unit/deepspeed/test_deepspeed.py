"""DeepSpeed on two processes trains as one process without it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import load_checkpoint_in_model
from tests.unit.deepspeed import ranks
from tests.unit.deepspeed.ranks import BATCH, STEPS
from tests.unit.deepspeed.small_gpt import SmallGPT
from tests.unit.multiprocess import run_worlds

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the extra deepspeed is not installed"),
    pytest.mark.slow,
]

WITHIN = 2e-5  # of losses near 3, over 50 steps in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """Everything that two processes did, by rank."""
    modules = ["deepspeed", "transformers.models.gpt2.modeling_gpt2"]
    (results,) = run_worlds(modules, ranks.everything, [(2, (str(folder),))], timeout=220)
    return results


def of(found: list[dict[str, Any]], name: str) -> list[Any]:
    results = [rank[name] for rank in found]
    assert not any(isinstance(result, str) for result in results), "\n".join(map(str, results))
    return results


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[float]]:
    """Losses by batch and norms by step of one process that sees the batches of both, without any library."""
    model, optimizer, scheduler, loader = ranks.parts()
    losses, norms = [], []
    batches = torch.stack(list(loader)).view(2 * STEPS, 2 * BATCH, -1)
    for number, batch in enumerate(batches, start=1):
        loss = model(batch)
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2 == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            for _ in range(2):
                scheduler.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] / 1.5, "it learned"
    assert max(norms) > 0.5, "gradients were clipped"
    return losses, norms


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_those_of_one_process(
    found: list[dict[str, Any]], plain: tuple[list[float], list[float]], stage: int
) -> None:
    """Over a checkpoint, with accumulation, clipping and a schedule, and gradients in between that are discarded."""
    for result in of(found, f"zero {stage}"):
        assert result["type"] == "DEEPSPEED"
        assert result["losses"] == pytest.approx(plain[0], abs=WITHIN)
        assert result["norms"] == pytest.approx(plain[1], rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_weights_come_out(found: list[dict[str, Any]], folder: Path, stage: int) -> None:
    first, second = of(found, f"zero {stage}")
    model = ranks.parts()[0]
    own = model.state_dict()
    assert first["first"].keys() == own.keys()
    assert all(torch.equal(first["first"][name], value) for name, value in own.items())
    assert (second["first"] == {}) == (stage == 3), "the main process of a node alone gathers shards"
    whole = sum(item.numel() for item in model.parameters())
    assert (first["held"] < whole) == (stage == 3)
    load_checkpoint_in_model(model, f"{folder}/{stage}-weights", strict=True)
    batch = ranks.parts()[3].dataset[:BATCH]
    assert model(batch).item() < SmallGPT()(batch).item() - 1, "they are those that were trained"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_refused_in_training(found: list[dict[str, Any]], folder: Path, stage: int) -> None:
    kept = folder / str(stage) / "pytorch_model"
    for result in of(found, f"zero {stage}"):
        expected = {
            "value": "ValueError: DeepSpeed with clip_grad_value_: it does not clip single elements of gradients. "
            "Call clip_grad_norm_",
            "kind": "ValueError: DeepSpeed with another norm_type than 2 (norm_type=1): DeepSpeed clips by the "
            "2-norm only. Leave norm_type out",
            "part": "ValueError: DeepSpeed clips all parameters of a model together: 1 of 28 were given",
            "stranger": "ValueError: none of the parameters to clip belongs to a model that was prepared",
            "closure": "ValueError: DeepSpeed with a closure for step(): its optimizers take none. Call step() after "
            "backward()",
            "alone": "ValueError: the parameters of SGD belong to none of the models in this call of prepare",
            "background": "ValueError: DeepSpeed writes its part of a checkpoint itself, while nothing trains",
            "count": f"CheckpointError: {kept.parent} holds 2 models that DeepSpeed saved",
            "shard": f"CheckpointError: {kept}/",
        }
        for name, text in expected.items():
            assert result["refusals"][name].startswith(text), result["refusals"][name]
        assert "is missing, though notebook_accel.json lists it" in result["refusals"]["shard"]
        assert re.search(
            r"zero_pp_rank_1_\S*: some of the bytes \S* to \S* are not those", result["refusals"]["damaged"]
        )


def test_a_checkpoint_that_does_not_fit_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(of(found, "misfit")):
        assert "'letters.weight' has shape [256, 32], the model's [256, 16]" in told[0]
        assert (
            "mp_rank_00_model_states.pt is missing: the checkpoint is not of a zero_stage below 3" in told[1]
        )
        assert (
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt is missing: the checkpoint is not of zero_stage 3"
            in told[2]
        )
        assert "'letters.weight' has shape [256, 32], the model's [256, 16]" in told[3]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_smaller_limit_clips(found: list[dict[str, Any]], stage: int) -> None:
    """Of the config's and the one that is asked for, which may be nothing."""
    for limits, norm in ranks.CLIPPED.items():
        assert of(found, f"clipped {stage} {limits}") == pytest.approx([norm, norm], abs=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_accumulate_in_every_loop(found: list[dict[str, Any]], stage: int) -> None:
    model, optimizer, _, loader = ranks.parts()
    expected = []
    batches = torch.stack(list(loader)).view(2 * STEPS, 2 * BATCH, -1)
    for one, other in batches[:8].split(2):
        (model(one) / 2).backward()
        loss = model(other)
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses in of(found, f"loops {stage}"):
        for way in losses:
            assert way == pytest.approx(expected, abs=WITHIN)


def test_auto_is_filled(found: list[dict[str, Any]]) -> None:
    steps = [max(0, step - 1) for step in range(10)]  # DeepSpeed's schedules begin with their first step
    rates = [2e-3 * min(step / 4, (20 - step) / 16) for step in steps]
    model, _, _, loader = ranks.parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0, weight_decay=0.1, betas=(0.8, 0.9))
    losses = []
    batches = torch.stack(list(loader)).view(2 * STEPS, 2 * BATCH, -1)
    for number, batch in enumerate(batches[:20]):
        loss = model(batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2 == 1:
            optimizer.param_groups[0]["lr"] = rates[number // 2]
            optimizer.step()
            optimizer.zero_grad()
    for result in of(found, "autos"):
        assert result["rates"] == pytest.approx(rates)
        assert result["losses"] == pytest.approx(losses, abs=WITHIN)
        assert result["config"] == {"train_batch_size": 2 * 2 * BATCH, "gradient_accumulation_steps": 2}
        assert result["optimizer"] == "AdamW", "torch's own, which needs no compiler"
        assert result["group"] == {"weight_decay": 0.1, "betas": (0.8, 0.9)}
        assert result["kept"], "the plugin serves the next model, too"


def test_a_model_of_transformers_is_sharded_from_the_start(found: list[dict[str, Any]]) -> None:
    first, second = of(found, "transformers")
    for result in (first, second):
        assert result["enabled"] == [True, False], "as the selected plugin says"
        assert result["held"] == [0, 0] and result["layer"] == 0
        assert result["losses"][-1] < result["losses"][0] - 0.5
        assert result["restored"], "loading brought back what was spoilt"
        assert result["differ"] == pytest.approx(0, abs=1e-6), "what was saved is what was trained"
        assert (
            result["stranger"] == "ValueError: there is no DeepSpeed plugin 'other', only 'shards', 'whole'"
        )
    assert "lm_head.weight" in first["spoilt"]
    assert "transformer.h.0.attn.c_attn.weight" in first["names"] and second["names"] == []


def test_two_models_train_in_turns(found: list[dict[str, Any]]) -> None:
    expected = ranks.adversaries(None)
    for losses in of(found, "several"):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_alone_goes_on_with_an_engine_that_was_released(
    found: list[dict[str, Any]], stage: int
) -> None:
    expected = ranks.again(None)
    for losses, refusal in of(found, f"again {stage}"):
        assert losses == pytest.approx(expected, rel=1e-5)
        asked = "no error" if stage == 3 else "ValueError: Linear came without its optimizer"
        assert refusal.startswith(asked), "ZeRO 3 shards models for evaluation too"


def test_bf16(found: list[dict[str, Any]]) -> None:
    for result in of(found, "bf16"):
        assert (result["weights"], result["outputs"]) == ("torch.bfloat16", "torch.float32")
        assert result["losses"][-1] < result["losses"][0] / 2


def test_norms_in_bf16_are_those_of_all_batches(found: list[dict[str, Any]]) -> None:
    sharded = of(found, "norms in bf16 2")[0]
    for name in ("norms in bf16 0", "norms in bf16, float32"):
        first, second = of(found, name)
        assert first == second == pytest.approx(sharded, rel=1e-3), name
