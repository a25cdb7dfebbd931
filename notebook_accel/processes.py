"""Runs code in some processes only, in turns, or on each process's share of the inputs; lets all stop together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import runtime as process
from .nested import honor_type, send_to_device
from .runtime import Runtime


@contextmanager
def split_between_processes(runtime: Runtime, inputs: Any, apply_padding: bool) -> Iterator[Any]:
    """Yield the share of this process; the first processes get one item more where the items do not divide.

    Args:
        runtime: of this process.
        inputs: a list, tuple, tensor, dataset with `select`, or a dict of these with one length. Every process gets
            the whole of anything else.
        apply_padding: repeat the last item until all shares have the same length, and move tensors to the device.

    Raises:
        ValueError: the values of a dict differ in length.
    """
    world_size, rank = runtime.topology.world_size, runtime.topology.rank
    if world_size == 1:
        yield inputs
        return
    length = _length(inputs)
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    own = size + (rank < extra)
    missing = (size + (extra > 0) - own) if apply_padding and length else 0
    share = _take(inputs, start, own, missing)
    yield send_to_device(share, runtime.device) if apply_padding else share


def _length(inputs: Any) -> int:
    """Return the number of items, 0 where there are none to split."""
    if not isinstance(inputs, dict):
        return len(inputs) if hasattr(inputs, "__len__") else 0
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"all values of the dict must have one length, but they have {lengths}")
    return next(iter(lengths.values()), 0)


def _take(inputs: Any, start: int, own: int, missing: int) -> Any:
    """Return `own` items from `start` on, and the last of all items `missing` times."""
    if isinstance(inputs, dict):
        return {key: _take(value, start, own, missing) for key, value in inputs.items()}
    if isinstance(inputs, torch.Tensor):
        part = inputs[start : start + own]
        return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else part
    if isinstance(inputs, (list, tuple)):
        return honor_type(
            inputs, [*inputs[start : start + own], *([inputs[-1]] * missing if missing else [])]
        )
    if hasattr(inputs, "select") and hasattr(inputs, "__len__"):
        return inputs.select([*range(start, start + own), *([len(inputs) - 1] * missing)])
    return inputs


@contextmanager
def take_turns(runtime: Runtime, is_first: bool) -> Iterator[None]:
    """Run the block in some processes first, then in the others.

    Args:
        runtime: of this process.
        is_first: whether this process is one of the first.
    """
    if not is_first:
        runtime.comm.barrier()
    try:
        yield
    finally:
        if is_first:
            runtime.comm.barrier()


def run_if(condition: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
    """Return a function that returns None where a condition does not hold.

    Args:
        condition: checked at each call.
        function: what to call; without it the result is a decorator.

    Raises:
        TypeError: it cannot be called.
    """
    if function is None:
        return functools.partial(run_if, condition)
    if not callable(function):
        raise TypeError(f"a function is needed to decorate, not {function!r:.80}")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return run


def should_stop() -> bool:
    """Return whether the notebook asked the run to stop; all ranks get True at the same call.

    It costs nothing, and is no collective: the launchers of all nodes agree on the question. Without a notebook it is
    always False.
    """
    reporter = process.reporter()
    return reporter is not None and reporter.should_stop()
