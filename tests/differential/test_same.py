"""Every case gives the same with Accelerate and with this package, in every rank."""

from __future__ import annotations

import pytest

from tests.differential.harness import GROUPS, OURS, REFERENCE, cases, differences, outcomes

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

# Where we differ on purpose: the world sizes, and why.
DIFFERENT: dict[str, tuple[tuple[int, ...], str]] = {
    "accumulation: iterable, sharded": (
        (2,),
        "Accelerate does not know which samples fill up the last batch of a dataset without a length",
    ),
    "collecting: reduce sum 0.5": ((1, 2), "Accelerate multiplies with `scale` under XLA only"),
    "collecting: reduce mean 0.5": ((1, 2), "Accelerate multiplies with `scale` under XLA only"),
    "collecting: split tuple, padded": ((2,), "Accelerate cannot pad a tuple"),
    "collecting: split dict, padded": ((2,), "Accelerate cannot pad a tuple"),
    "objects: returned default dict": ((1, 2), "Accelerate cannot rebuild a defaultdict"),
    "objects: returned dataclass": ((1, 2), "Accelerate leaves what is in a dataclass in bfloat16"),
    **{
        f"objects: {how}, bf16{whole}": ((1, 2), "with Accelerate the copy computes in float32")
        for how in ("pickle", "save")
        for whole in ("", ", whole")
    },
    **{
        f"objects: compiled, {mode}, regional": (
            (2,),
            "with Accelerate `unwrap_model` leaves the DDP wrapper on",
        )
        for mode in ("no", "bf16")
    },
    "objects: compiled, names": (
        (1, 2),
        "Accelerate's `get_state_dict` has torch.compile's prefix in its names",
    ),
    "objects: compiled by the user": ((2,), "with Accelerate `unwrap_model` leaves the compiled model"),
    "objects: nothing to train": ((2,), "Accelerate wraps a frozen model in DDP, which raises"),
    "objects: own forward": ((1, 2), "Accelerate binds a forward that is set on the instance to the model"),
    **{
        f"schedulers: ReduceLROnPlateau, {setting}": (
            (2,),
            "Accelerate counts an observation once for each process",
        )
        for setting in ("by default", "2 steps", "2 steps, unadjusted")
    },
    "tools: tracked twice": ((1, 2), "Accelerate leaves the first run open, and has every tracker twice"),
    "tools: tensorboard, odd numbers": (
        (1, 2),
        "Accelerate drops NumPy's numbers and tensors with a dimension",
    ),
    "tools: tensorboard, odd config": ((1, 2), "Accelerate hands TensorBoard what it refuses"),
    "tools: batch size, torch's error": ((1, 2), "Accelerate reads the message, not the class"),
    "tools: ranks": ((1, 2), "Accelerate tells ranks under a ParallelismConfig only"),
    "tools: clip alone": ((1, 2), "Accelerate clips the rows of a single tensor, which have no gradients"),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("group", "case"), [pytest.param(group, case, id=case) for group in GROUPS for case in cases(group)]
)
def test_same(group: tuple[str, ...], case: str, world_size: int) -> None:
    ours, theirs = outcomes(OURS, world_size, group), outcomes(REFERENCE, world_size, group)
    found = [
        text
        for rank in range(world_size)
        for text in differences(ours[rank][case], theirs[rank][case], f"rank {rank}")
    ]
    assert "raised" not in ours[0][case], ours[0][case]["because"]
    if world_size in DIFFERENT.get(case, ((), ""))[0]:
        assert found, "there is no difference any more: take the case out of DIFFERENT"
    else:
        assert not found, "\n".join(found[:5])
