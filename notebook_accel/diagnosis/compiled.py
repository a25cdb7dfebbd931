"""Checks of libraries that are compiled for one release of torch: each is imported in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import probes, tpu
from . import packages
from .check import Check


def check_torchao(name: str) -> Iterable[Check]:
    """Yield whether torchao works; nothing where it is not installed."""
    if (installed := probes.version("torchao")) is None:
        return
    if problem := packages.find_torchao_problem():
        remedy = "install a torchao that was released with this torch"
        yield Check(name=name, status="warning", text=problem, remedy=remedy)
    else:
        yield Check(
            name=name,
            status="ok",
            text=f"torchao {installed} can be imported beside torch {torch.__version__}",
        )


def check_torch_xla(name: str) -> Iterable[Check]:
    """Yield whether torch_xla fits and works. Where it is not installed, that is a problem beside a TPU only."""
    installed = probes.version("torch_xla")
    if installed is not None:
        yield _check_installed(name, installed)
    elif tpu.is_here() and not probes.is_available("torch_xla"):
        yield Check(
            name=name,
            status="problem",
            text=f"this machine has a TPU (chips: {tpu.chips()}), and torch_xla is not installed",
            remedy=tpu.advise_install(torch.__version__),
        )


def _check_installed(name: str, installed: str) -> Check:
    """Return whether torch_xla fits and works: each of its releases is built for the torch of its number."""
    built_for = _release(installed)
    text = f"torch_xla {installed} is built for torch {built_for}, torch {torch.__version__} is there"
    if built_for != _release(torch.__version__):
        remedy = (
            f"pip install 'torch=={built_for}.*', then start a new kernel"
            if built_for in tpu.RELEASES
            else tpu.advise_install(torch.__version__)
        )
        return Check(name=name, status="problem", text=text, remedy=remedy)
    if problem := packages.find_torch_xla_problem():
        remedy = f"install it anew in an environment or kernel that is new: {tpu.advise_install(torch.__version__)}"
        return Check(name=name, status="problem", text=problem, remedy=remedy)
    return Check(name=name, status="ok", text=text)


def _release(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])
