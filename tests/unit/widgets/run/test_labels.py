"""Numbers as a chart writes them."""

from __future__ import annotations

import pytest

from notebook_accel.widgets.run.labels import format_long, format_short, format_ticks, measure
from notebook_accel.widgets.run.scale import Scale

ROOM = 52.0


@pytest.mark.parametrize(
    ("value", "short", "long"),
    [
        (0.021460617, "0.02146", "0.0214606"),
        (2e-05, "2e-05", "2e-05"),
        (12345.678, "12346", "12345.7"),
        (123456789.0, "123.5M", "123,456,789"),
        (-7.2e9, "-7.2G", "-7,200,000,000"),
        (1e300, "1e+300", "1e+300"),
        (0.0, "0", "0"),
    ],
)
def test_numbers_are_short_or_whole(value: float, short: str, long: str) -> None:
    assert (format_short(value), format_long(value)) == (short, long)


@pytest.mark.parametrize(
    ("first", "count", "step", "labels", "start"),
    [
        (0, 3, 0.5, ["0", "0.5", "1.0"], ""),
        (-1, 3, 20.0, ["-20", "0", "20"], ""),
        (0, 3, 500_000.0, ["0", "0.5M", "1.0M"], ""),
        (1234, 3, 100_000.0, ["123.4M", "123.5M", "123.6M"], ""),
        (0, 3, 5e-6, ["0", "0.5e-5", "1.0e-5"], ""),
        (5_000_000_001, 2, 2e-1, ["+0", "+0.2"], "1,000,000,000.2"),
    ],
)
def test_labels_of_an_axis(first: int, count: int, step: float, labels: list[str], start: str) -> None:
    assert format_ticks(first, count, step, ROOM) == (labels, start)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("low", "high"),
    [
        (123456789.0, 123866389.0),
        (123456789.0, 123456790.0),
        (-123456790.0, -123456789.0),
        (1e6, 1e6 + 500),
        (1e-7, 3e-7),
        (1.0000001e-7, 1.0000002e-7),
        (-1e-300, 2e-300),
        (1e15, 9e15),
        (1e300, 1.0001e300),
        (99999.1, 99999.4),
        (1e9, 1e9),
        (0.0, 1e12),
    ],
)
def test_labels_fit_and_differ(low: float, high: float, log: bool) -> None:
    if log and low <= 0:
        low, high = abs(high) / 1e9, abs(high)  # such a scale has positive values alone
    ticks = Scale(low, high, 0.0, 100.0, log=log).ticks(5, ROOM)
    labels = [label for _, label in ticks.labels]
    assert len(set(labels)) == len(labels) and max(map(measure, labels), default=0.0) <= ROOM
    assert all(-1.0 <= place <= 101.0 for place, _ in ticks.labels)
