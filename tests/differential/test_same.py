"""Every case gives the same with Accelerate and with this package, in every rank."""

from __future__ import annotations

import pytest

from tests.differential.harness import OURS, REFERENCE, cases, differences, outcomes

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
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", cases())
def test_same(case: str, world_size: int) -> None:
    ours, theirs = outcomes(OURS, world_size), outcomes(REFERENCE, world_size)
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
