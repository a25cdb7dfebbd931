"""What decides the order of an epoch's samples: the states of samplers, and of what they draw from."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from .indices import draw_seed
from .samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler, is_plain, sampler_chain

_DRAWING: Final = (RandomSampler.__iter__, SubsetRandomSampler.__iter__, WeightedRandomSampler.__iter__)
"""How torch's samplers draw, of which it is known what they draw from the global generator."""

Order = list[dict[str, Any]]
"""What decides the order of an epoch, a dict for each sampler; see `order_of`."""


def order_of(sampler: Any, *, with_global: bool = False) -> Order:
    """Return what decides the order of a sampler's next epoch, whatever the number of processes.

    Args:
        sampler: a batch sampler or sampler.
        with_global: add torch's global generator where no sampler of a shuffled epoch has one of its own.

    Returns:
        A dict for each of the user's samplers, from the outermost to the innermost; see `restore_order`.
    """
    states: Order = []
    parts = _own_parts(sampler)
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(part, SeedableRandomSampler):
            states.append({"epoch": part.epoch, "initial_seed": part.initial_seed})
        elif isinstance(generator, torch.Generator):
            states.append({"generator": generator.get_state()})
        else:
            states.append({})
    if with_global and not any(states) and not _is_sequential(parts):
        states[-1] = {"global": torch.get_rng_state()}
    return states


def are_same(one: Order, other: Order) -> bool:
    """Return True if two orders of one sampler are equal."""
    return all(
        torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value == found[key]
        for state, found in zip(one, other, strict=True)
        for key, value in state.items()
    )


def _is_sequential(parts: list[Any]) -> bool:
    """Return True for samplers of which it is known that they draw nothing: the samples come in their order."""
    return isinstance(parts[-1], SequentialSampler) and all(map(is_plain, parts[:-1]))


def _own_parts(sampler: Any) -> list[Any]:
    """Return the user's own samplers of a chain: those that share out and skip decide no order."""
    return [
        part for part in sampler_chain(sampler) if type(part) not in (SkipBatchSampler, BatchSamplerShard)
    ]


def restore_order(sampler: Any, states: Order) -> None:
    """Let the sampler's next epoch have the order of `states`.

    In a run of several processes samplers have generators of their own; alone they draw from the global one.

    Args:
        sampler: made as the one that `order_of` was called with.
        states: what `order_of` returned.

    Raises:
        ValueError: the states are of other samplers.
    """
    parts = _own_parts(sampler)
    if len(parts) != len(states) or not all(map(_fits, parts, states)):
        raise ValueError(
            f"the state is of a loader with {len(states)} samplers, {[sorted(state) for state in states]}, and does "
            f"not fit this one's, {[type(part).__name__ for part in parts]}: make and prepare the loader as before"
        )
    for part, state in zip(parts, states, strict=True):
        if "epoch" in state:
            part.epoch, part.initial_seed = state["epoch"], state["initial_seed"]
        elif "generator" in state:
            if part.generator is None:
                part.generator = torch.Generator()
            part.generator.set_state(state["generator"])
        elif "global" in state and getattr(part, "generator", None) is None:
            torch.set_rng_state(state["global"])
        elif "global" in state:
            part.generator.set_state(_as_own(part, state["global"]))


def _fits(part: Any, state: dict[str, Any]) -> bool:
    if isinstance(part, SeedableRandomSampler) or "epoch" in state:
        return isinstance(part, SeedableRandomSampler) and "epoch" in state
    if "generator" in state:
        return hasattr(part, "generator")
    if "global" in state and isinstance(getattr(part, "generator", None), torch.Generator):
        return type(part).__iter__ in _DRAWING
    return True


def _as_own(sampler: Any, state: torch.Tensor) -> torch.Tensor:
    """Return the state of a sampler's own generator that gives the order which the global one gave."""
    generator = torch.Generator()
    generator.set_state(state)
    if isinstance(sampler, RandomSampler):  # it draws a seed
        generator.manual_seed(draw_seed(generator))
    return generator.get_state()
