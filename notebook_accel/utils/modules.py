"""Looks at the modules inside a model."""

from __future__ import annotations

from typing import Any

from torch import nn

_TRANSFORMER_ENGINE = frozenset({"LayerNorm", "Linear", "TransformerLayer"})


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return all modules of a model, each after those inside it, the model last.

    Args:
        model: any model. A module in several places comes once for each.
        return_fqns: return (qualified name, module) for each.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        # a module before its children, children in reverse: the list is reversed at the end
        found.append((name, module))
        for child_name, child in reversed(list(module.named_children())):
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    found.reverse()
    return found if return_fqns else [module for _, module in found]


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return True if a module of a model is a layer of Transformer Engine, which need not be installed.

    Args:
        model: any model.
    """
    return any(
        kind.__module__.partition(".")[0] == "transformer_engine" and kind.__name__ in _TRANSFORMER_ENGINE
        for module in model.modules()
        for kind in type(module).__mro__
    )
