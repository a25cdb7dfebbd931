"""Prepared loaders beside Accelerate's: what ranks read, what metrics gather, every difference with a reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from notebook_accel.data_loader import BatchSamplerShard, IterableDatasetShard, skip_first_batches
from tests.differential.loaders import Case, Pieces, SizedStream, cases, first_leaf, observe
from tests.unit.multiprocess import run_ranks

theirs = pytest.importorskip("accelerate.data_loader", reason="Accelerate is what loaders are compared with")

WORLDS = [1, 2, 3]


def _observe_all(world: int) -> list[dict[str, Any]]:
    """Return both libraries' view of every case; an error of Accelerate is a view too."""
    seen = []
    for case in cases(world):
        both: dict[str, Any] = {"ours": observe("notebook_accel", case)}
        if world > 1 and failure(case, world):  # a rank that fails leaves the others waiting
            both["theirs"] = {"error": "expected"}
        else:
            both["theirs"] = _attempt(case)
        seen.append(both)
    return seen


def _attempt(case: Case) -> dict[str, Any]:
    try:
        return observe("accelerate", case)
    except Exception as error:
        return {"error": type(error).__name__}


def failure(case: Case, world: int) -> str | None:
    """Return why Accelerate fails in this case, None where it does not."""
    if case.own:
        return "Accelerate gives DataLoader the batch size twice where the sampler makes the batches"
    if case.shape in ("record", "deep"):
        return "Accelerate neither gathers nor dispatches dataclasses"
    if not case.config.get("dispatch_batches"):
        return None
    span = case.batch_size if case.config.get("split_batches") else case.batch_size * world
    left = case.n - case.batch_size * case.skip if case.data == "map" else case.n
    if left <= 0 or (case.drop_last and case.n < span):
        return "Accelerate fails where nothing is left to dispatch"
    if 0 < case.n < -case.n % world:
        return "Accelerate hangs where the first batch is too short to complete the last one"
    return None


def differences(case: Case, world: int) -> dict[str, str]:
    """Return the parts of the view in which Accelerate is wrong about this case, each with the reason."""
    split, even = case.config.get("split_batches", False), case.config.get("even_batches", True)
    dispatch = case.config.get("dispatch_batches", False)
    short = case.n % (case.batch_size if split else case.batch_size * world)
    found = {}
    if reason := failure(case, world):
        return dict.fromkeys(("error", "len", "epochs", "skipped"), reason)
    if dispatch and case.data == "map" and not split and world > 1 and case.n > case.batch_size:
        found["skipped"] = (
            "Accelerate skips batches of the raw loader; ours skip what all ranks got in a step"
        )
    misses = 0 < short <= case.batch_size - case.batch_size // world
    if case.data == "map" and split and not even and not case.drop_last and misses:
        found["len"] = "Accelerate counts a last batch that the rank does not get"
    if case.given and case.drop_last and case.n >= case.batch_size * world:
        found["epochs"] = "Accelerate's metrics cut a whole last batch by the samples that were dropped"
    if world > 1 and case.data != "map" and not dispatch:
        if not case.drop_last and ((case.data == "stream" and case.n) or short):
            found["epochs"] = "Accelerate's metrics count the samples that complete the last batch"
        if case.data == "sized" and split and len_is_rounded(case, world):
            found["len"] = "Accelerate divides the length by the number of processes a second time"
    return found


def len_is_rounded(case: Case, world: int) -> bool:
    """Return True if Accelerate's length of a stream that splits batches is not the number of its batches."""
    span = case.batch_size * world
    rounds = case.n // span if case.drop_last else -(-case.n // span)
    batches = case.n // case.batch_size if case.drop_last else -(-case.n // case.batch_size)
    return rounds * world != batches


@pytest.mark.parametrize("world", WORLDS)
def test_views_of_real_ranks(world: int) -> None:
    ranks = run_ranks(_observe_all, world, world_size=world, timeout=240)
    wrong, stale = [], []
    for number, case in enumerate(cases(world)):
        views = [rank[number] for rank in ranks]
        check_ours(case, [view["ours"] for view in views])
        excused = differences(case, world)
        different = {
            part
            for view in views
            for part in set(view["ours"]) | set(view["theirs"])
            if view["ours"].get(part) != view["theirs"].get(part)
        }
        wrong += [(case, part, views) for part in different - set(excused)]
        stale += [(case, part) for part in set(excused) - different]
    assert not wrong, wrong[0]
    assert not stale, stale[:3]


def check_ours(case: Case, views: list[dict[str, Any]]) -> None:
    """Check what holds for every case: the lengths are true, and metrics see every sample once, in order."""
    for view in views:
        first, second = view["epochs"]
        assert view["len"] in ("unknown", len(first)), case
        assert len(first) == len(second), case
        assert len(view["skipped"]) == max(0, len(first) - case.skip), case
        assert [step[1] == "more" for step in first] == [True] * (len(first) - 1) + [False] * bool(first), (
            case
        )
        if case.even:
            gathered = [number for step in first for number in first_leaf(step[2])]
            span = case.batch_size * (1 if case.config.get("split_batches") else len(views))
            kept = case.n - case.n % span if case.drop_last else case.n
            assert len(set(gathered)) == len(gathered) == kept, case
            assert case.shuffle != "no" or gathered == list(range(kept)), case


def shards(kind: Any, make: Any, world: int, **options: Any) -> list[Any]:
    """Return the whole epoch and the length of each share."""
    epochs = []
    for rank in range(world):
        shard = kind(make(), num_processes=world, process_index=rank, **options)
        epochs.append((list(shard), len(shard)))
    return epochs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 24),
    n=st.integers(0, 120),
    size=st.integers(1, 6),
    drop=st.booleans(),
    split=st.booleans(),
    even=st.booleans(),
    own=st.booleans(),
)
def test_shares_of_batches_in_worlds_that_are_simulated(
    world: int, n: int, size: int, drop: bool, split: bool, even: bool, own: bool
) -> None:
    size = size * world if split else size

    def make() -> Any:
        if own and not drop:
            sizes = [size] * (n // size) + [n % size] * (n % size > 0)
            return Pieces(sizes, size)
        return BatchSampler(SequentialSampler(range(n)), size, drop)

    options = {"split_batches": split, "even_batches": even}
    ours = shards(BatchSamplerShard, make, world, **options)
    expected = shards(theirs.BatchSamplerShard, make, world, **options)
    assert [batches for batches, _ in ours] == [batches for batches, _ in expected]
    if not split or even:
        assert ours == expected
    elif not own:
        assert all(length == len(batches) for batches, length in ours)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(world=st.integers(1, 12), sizes=st.lists(st.integers(1, 5), max_size=40), even=st.booleans())
def test_shares_of_batches_of_any_size(world: int, sizes: list[int], even: bool) -> None:
    options = {"even_batches": even}
    ours = shards(BatchSamplerShard, lambda: Pieces(sizes), world, **options)
    assert ours == shards(theirs.BatchSamplerShard, lambda: Pieces(sizes), world, **options)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 24),
    n=st.integers(0, 120),
    size=st.integers(1, 6),
    drop=st.booleans(),
    split=st.booleans(),
)
def test_shares_of_streams_in_worlds_that_are_simulated(
    world: int, n: int, size: int, drop: bool, split: bool
) -> None:
    size = size * world if split else size
    options = {"batch_size": size, "drop_last": drop, "split_batches": split}
    ours = shards(IterableDatasetShard, lambda: SizedStream(n), world, **options)
    expected = shards(theirs.IterableDatasetShard, lambda: SizedStream(n), world, **options)
    assert [samples for samples, _ in ours] == [samples for samples, _ in expected]
    assert all(length == len(samples) for samples, length in ours)


def test_skipping_is_accelerates() -> None:
    for n, size, count in itertools.product((0, 1, 7, 8), (1, 3), (0, 1, 2, 9)):
        loader: Any = DataLoader(list(range(n)), batch_size=size)  # type: ignore[arg-type]
        ours = [batch.tolist() for batch in skip_first_batches(loader, count)]
        assert ours == [batch.tolist() for batch in theirs.skip_first_batches(loader, count)]
