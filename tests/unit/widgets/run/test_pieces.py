"""Lines of charts have gaps where values are not finite, also when they are thinned."""

from __future__ import annotations

import math
import random

import pytest

from notebook_accel.widgets.run.pieces import MAX_POINTS, cut, describe_gaps, downsample, find_gaps

NAN = math.nan


def test_downsampling_keeps_extremes_and_ends() -> None:
    noise = random.Random(0)
    pairs = [(float(x), noise.gauss(0, 1)) for x in range(12_345)]
    pairs[7777] = (7777.0, 50.0)
    pairs[3] = (3.0, -50.0)
    kept = downsample(pairs)
    assert len(kept) <= MAX_POINTS == 500
    assert {pairs[0], pairs[-1], pairs[7777], pairs[3]} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert downsample(pairs[:500]) == pairs[:500]
    assert len(downsample(pairs[:501])) <= 500


@pytest.mark.parametrize("limit", [120, MAX_POINTS])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.99, 1.0])
def test_downsampling_keeps_gaps_within_its_limit(share: float, limit: int) -> None:
    noise = random.Random(1)
    pairs = [(float(x), NAN if noise.random() < share else noise.gauss(0, 1)) for x in range(12_345)]
    pairs[5000] = (5000.0, NAN)
    kept = downsample(pairs, limit)
    assert limit // 3 < len(kept) <= limit and set(kept) <= set(pairs)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert any(math.isnan(y) and abs(x - 5000) < 3 * len(pairs) / limit for x, y in kept)
    values = [y for _, y in pairs if not math.isnan(y)]
    if values:
        assert {min(values), max(values)} <= {y for _, y in kept}


def test_one_gap_costs_a_long_line_none_of_its_points() -> None:
    pairs = [(float(x), math.sin(x)) for x in range(12_345)]
    whole = len(downsample(pairs))
    pairs[5000] = (5000.0, NAN)
    assert len(downsample(pairs)) > 0.95 * whole


def test_pieces_end_at_gaps_and_at_edges() -> None:
    pairs = [
        (0.0, 1.0),
        (1.0, 3.0),
        (2.0, NAN),
        (3.0, 1.0),
        (4.0, math.inf),
        (5.0, 5.0),
        (6.0, NAN),
        (7.0, 1.0),
    ]
    assert list(cut(pairs, 0.0, 2.0)) == [[(0.0, 1.0), (0.5, 2.0)], [(3.0, 1.0)], [(7.0, 1.0)]]
    assert list(cut([(0.0, NAN)], 0.0, 1.0)) == []


def test_gaps_are_told_by_their_places() -> None:
    pairs = [(float(x), NAN if x in (10, 11, 12, 20) else 1.0) for x in range(25)]
    assert describe_gaps(find_gaps(pairs), "step") == "nan at step 10 to 12, 20"
    again = [(8.0, 1.0), (9.0, -math.inf), (0.0, NAN), (1.0, 1.0)]  # a run that began again
    assert describe_gaps(find_gaps(again), "step") == "nan or -inf at step 0, 9"
    often = [(float(x), NAN if x % 2 else 1.0) for x in range(20)]
    assert describe_gaps(find_gaps(often), "seconds") == "nan at seconds 1, 3, 5, 7, 9, 11 and 4 more"
