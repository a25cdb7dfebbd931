"""Tensor parallel: the layers of a model split over processes by torch's parallelize_module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ..dtensors import is_sharded

_WORDS: Final = (
    "colwise",
    "colwise_rep",
    "colwise_gather_output",
    "rowwise",
    "rowwise_rep",
    "embedding_rowwise",
    "sequence_parallel",
)


def is_split(model: torch.nn.Module) -> bool:
    """Return True if processes hold parts of weights already, as `from_pretrained(tp_plan="auto")` leaves them.

    Args:
        model: any.
    """
    return any(map(is_sharded, model.parameters()))


def split(model: torch.nn.Module, mesh: Any, plan: dict[str, Any] | None) -> None:
    """Split the layers that a plan names over the processes of a mesh of one dimension, in place.

    Args:
        model: on the device, with the same values in all processes.
        mesh: of the processes that share each layer.
        plan: patterns of module names with styles; by default the model's `tp_plan`, or `_tp_plan` of transformers.

    Raises:
        ValueError: there is no plan, a style is unknown, or a layer cannot be divided by the number of processes.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    given = plan or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not given:
        raise ValueError(
            f"{type(model).__name__} has no tp_plan: give one by TorchTensorParallelConfig(plan={{'layers.*.up': "
            "'colwise', 'layers.*.down': 'rowwise'}})"
        )
    names = {name for name, _ in model.named_modules()}
    styles = {_as_torch_has_it(pattern, names): _style(pattern, word) for pattern, word in given.items()}
    if not any(_matches(pattern, names) for pattern in styles):
        raise ValueError(
            f"the tensor parallel plan names {', '.join(styles)}, and {type(model).__name__} has no such module"
        )
    _check_divisible(model, styles, mesh.size())
    tied = _find_ties(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    parallelize_module(model, mesh, styles)
    for name in frozen:  # older versions of torch, such as 2.9, split them into parameters that are trained
        model.get_parameter(name).requires_grad_(False)
    for first, *others in tied:
        _tie(model, first, others)


def _find_ties(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    found: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _tie(model: torch.nn.Module, first: str, others: list[str]) -> None:
    """Let layers that shared a parameter share its split version."""
    parameter = model.get_parameter(first)
    for name in others:
        other = model.get_parameter(name)
        one, two = (getattr(item, "placements", None) for item in (parameter, other))
        if one != two:
            raise ValueError(
                f"{first!r} and {name!r} are one weight, and the tensor parallel plan splits it in two ways, {one} and "
                f"{two}: give both layers a style that splits alike, or neither"
            )
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, parameter)


def _as_torch_has_it(pattern: str, names: set[str]) -> str:
    """Return the pattern below the module that a plan of transformers leaves out, its base model."""
    if _matches(pattern, names):
        return pattern
    roots = sorted({name.split(".")[0] for name in names if name})
    return next((f"{root}.{pattern}" for root in roots if _matches(f"{root}.{pattern}", names)), pattern)


def _matches(pattern: str, names: set[str]) -> list[str]:
    wanted = pattern.split(".")
    return [
        name
        for name in names
        if len(parts := name.split(".")) == len(wanted)
        and all(want in ("*", part) for want, part in zip(wanted, parts, strict=True))
    ]


def _style(pattern: str, word: Any) -> Any:
    from torch.distributed.tensor import Replicate, parallel

    if isinstance(word, parallel.ParallelStyle):
        return word
    made: dict[str, Callable[[], Any]] = {
        "colwise": parallel.ColwiseParallel,
        "colwise_rep": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: parallel.ColwiseParallel(output_layouts=Replicate()),
        "rowwise": parallel.RowwiseParallel,
        "rowwise_rep": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: parallel.RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": parallel.SequenceParallel,
    }
    if word not in made:
        raise ValueError(
            f"tensor parallel style {word!r} of {pattern!r} is unknown, choose among {', '.join(_WORDS)} or a "
            "ParallelStyle of torch.distributed.tensor.parallel"
        )
    return made[word]()


def _check_divisible(model: torch.nn.Module, styles: dict[str, Any], size: int) -> None:
    names = {name for name, _ in model.named_modules()}
    for pattern, style in styles.items():
        dimension = {"ColwiseParallel": 0, "RowwiseParallel": 1}.get(type(style).__name__)
        for name in _matches(pattern, names):
            layer = model.get_submodule(name)
            weight = getattr(layer, "weight", None) if isinstance(layer, torch.nn.Linear) else None
            if dimension is not None and isinstance(weight, torch.Tensor) and weight.shape[dimension] % size:
                raise ValueError(
                    f"{name!r} has a weight of shape {list(weight.shape)}, whose dimension {dimension} cannot be "
                    f"divided over tp {size}"
                )
