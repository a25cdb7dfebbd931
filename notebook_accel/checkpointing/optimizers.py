"""Whether the stored state of an optimizer is of its kind: what each of torch.optim reads of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from ..errors import CheckpointError

_NEEDS: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(keys.split())
    for kind, keys in {
        "ASGD": "eta mu ax",
        "Adadelta": "square_avg acc_delta",
        "Adafactor": "",
        "Adagrad": "sum",
        "Adam": "exp_avg exp_avg_sq",
        "AdamW": "exp_avg exp_avg_sq",
        "Adamax": "exp_avg exp_inf",
        "LBFGS": "",
        "Muon": "momentum_buffer",
        "NAdam": "exp_avg exp_avg_sq mu_product",
        "RAdam": "exp_avg exp_avg_sq",
        "RMSprop": "square_avg",
        "Rprop": "prev step_size",
        "SGD": "",
        "SparseAdam": "exp_avg exp_avg_sq",
    }.items()
}
"""Keys without which an optimizer cannot go on from a parameter's state, where that has any."""
_KNOWS: Final[Mapping[str, frozenset[str]]] = {
    "Adafactor": frozenset({"row_var", "col_var", "variance"}),
    "Adam": frozenset({"max_exp_avg_sq"}),
    "AdamW": frozenset({"max_exp_avg_sq"}),
    "RMSprop": frozenset({"momentum_buffer", "grad_avg"}),
    "SGD": frozenset({"momentum_buffer"}),
}
"""Keys that depend on options or shapes."""
_ALL: Final = frozenset().union(*_NEEDS.values(), *_KNOWS.values())
_FILLED: Final = frozenset(
    {
        "amsgrad",
        "capturable",
        "centered",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "maximize",
        "nesterov",
    }
)
"""Options that torch adds where a checkpoint of another version has none."""
_HOW: Final = ("foreach", "fused")
"""Options that say how steps are computed, not what they compute."""


def load(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a stored state into an optimizer, which goes on to compute its steps in the way that it does now.

    What a checkpoint says of that depends on how weights were spread over the processes that wrote it.

    Args:
        optimizer: the raw optimizer.
        state: with as many groups of parameters as the optimizer has.
    """
    groups = [
        {**stored, **{key: own[key] for key in _HOW if key in own}}
        for own, stored in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})


def check_kind(
    where: object,
    raw: Any,
    groups: Iterable[Mapping[str, Any]],
    states: Iterable[tuple[object, Collection[Any]]],
) -> None:
    """Raise CheckpointError where a stored state is of another kind of optimizer, which torch would load.

    Optimizers that are not torch's own may have any state. One without state, of before the first step, fits where its
    options do. What neither this kind nor another of torch's knows, users added.

    Args:
        where: file or folder, for the message.
        raw: the optimizer to load into.
        groups: the stored options of its groups.
        states: a parameter's name or number, and the keys of its stored state.
    """
    kind = type(raw).__name__
    if not type(raw).__module__.startswith("torch.optim.") or kind not in _NEEDS:
        return
    problems = []
    options = {str(key) for key in raw.defaults} - _FILLED
    for number, group in enumerate(groups):
        if missing := sorted(options - set(group)):
            problems.append(f"group {number} has no {_join_keys(missing)}")
            break
    foreign = _ALL - _NEEDS[kind] - _KNOWS.get(kind, frozenset())
    for name, keys in states:
        missing = sorted(_NEEDS[kind] - set(keys)) if keys else []
        unknown = sorted(foreign & set(keys))
        if missing:
            problems.append(f"the state of parameter {name} has no key {_join_keys(missing)}")
        if unknown:
            problems.append(f"the state of parameter {name} has {_join_keys(unknown)}, of another optimizer")
        if missing or unknown:
            break
    if problems:
        raise CheckpointError(f"{where} does not fit {kind}: {'; '.join(problems)}")


def _join_keys(keys: Iterable[str]) -> str:
    return ", ".join(map(repr, keys))
