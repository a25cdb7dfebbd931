"""print_metrics: prints the numbers of a step, and sends them to the view of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import runtime, topology


def print_metrics(values: Mapping[str, Any] | None = None, *, step: int | None = None, **named: Any) -> None:
    """Print values on one line in rank 0, and send the numbers among them to the view and to `run.metrics`.

    `print_metrics(step=10, loss=loss)` prints `step 10: loss 0.25`. A tensor or array of one element is a number.
    Other ranks print nothing, and do not have to call it. The notebook has the numbers of those that do, too.

    Args:
        values: values by name, also by names that cannot be keywords.
        step: number of the step.
        named: more values.

    Raises:
        TypeError: `values` is no mapping, or `step` is nothing that counts.
        ValueError: `step` is no whole number, as 0.5 or a text.
    """
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"print_metrics takes values by name, as {{'loss': 0.5}} or loss=0.5, not {values!r}")
    current, reporter = runtime.current(), runtime.reporter()
    is_main = (topology.from_environ() if current is None else current.topology).is_main
    everything = {**(values or {}), **named}
    sends = reporter is not None and reporter.takes_metrics(everything)
    if not (is_main or sends):
        return
    from .tracking.values import numbers_in, read_step

    at = read_step(step)
    numbers = numbers_in(everything)
    if is_main:
        shown = {str(name): value for name, value in everything.items()} | {
            name: f"{number:.4g}" for name, number in numbers.items()
        }
        words = ", ".join(f"{name} {value}" for name, value in shown.items())
        print(words if at is None else f"step {at}: {words}", flush=True)
    if reporter is not None and sends and numbers:
        reporter.metrics(numbers, at)
