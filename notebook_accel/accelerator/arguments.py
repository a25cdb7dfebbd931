"""What single arguments of an Accelerator may be; all that are wrong are named in one error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from ..checked import is_flag
from ..config.argument_checks import ArgumentCheck, Check, check_integer, check_truth, find_problems
from ..fsdp import FullyShardedDataParallelPlugin
from ..handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProjectConfiguration,
)
from ..parallelism import ParallelismConfig, TorchTensorParallelPlugin

UNSET: Final = object()
"""The default of `split_batches`, which tells whether it was given."""


def _check_kind(kind: type) -> Check:
    def check(name: str, value: Any) -> Iterator[Exception]:
        if not isinstance(value, kind):
            yield TypeError(f"{name} must be a {kind.__name__}, not {value!r}")

    return check


def _check_flag(name: str, value: Any) -> Iterator[Exception]:
    if not is_flag(value):
        yield from check_truth(name, value)


def _check_several(name: str, value: Any) -> Iterator[Exception]:
    if isinstance(value, (str, KwargsHandler)) or not isinstance(value, Iterable):
        yield TypeError(f"{name}={value!r}: a list is needed, perhaps [{value!r}]")


CHECKS: Final[Mapping[str, ArgumentCheck]] = {
    "device_placement": ArgumentCheck(default=True, check=_check_flag),
    "split_batches": ArgumentCheck(default=UNSET, check=_check_flag),
    "gradient_accumulation_steps": ArgumentCheck(default=1, check=check_integer(1)),
    "cpu": ArgumentCheck(default=False, check=_check_flag),
    "dataloader_config": ArgumentCheck(default=None, check=_check_kind(DataLoaderConfiguration)),
    "fsdp_plugin": ArgumentCheck(default=None, check=_check_kind(FullyShardedDataParallelPlugin)),
    "torch_tp_plugin": ArgumentCheck(default=None, check=_check_kind(TorchTensorParallelPlugin)),
    "rng_types": ArgumentCheck(default=None, check=_check_several),
    "project_config": ArgumentCheck(default=None, check=_check_kind(ProjectConfiguration)),
    "gradient_accumulation_plugin": ArgumentCheck(
        default=None, check=_check_kind(GradientAccumulationPlugin)
    ),
    "step_scheduler_with_optimizer": ArgumentCheck(default=True, check=_check_flag),
    "kwargs_handlers": ArgumentCheck(default=None, check=_check_several),
    "parallelism_config": ArgumentCheck(default=None, check=_check_kind(ParallelismConfig)),
}
"""By name; arguments that are not here are checked by what they are for."""


def check_arguments(values: Mapping[str, Any]) -> None:
    """Check each argument by itself.

    Args:
        values: arguments by name; others than those of `CHECKS` are left out.

    Raises:
        TypeError: arguments are of a wrong type, and no value is out of bounds.
        ValueError: a value is out of bounds. Either error names all wrong arguments.
    """
    _raise_all([error for found in find_problems(CHECKS, values, {}).values() for error in found])


def check_steps(name: str, value: Any) -> None:
    """Check a number of steps, or of batches per step.

    Args:
        name: what it is called in the error.
        value: the number.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below 1.
    """
    _raise_all(list(check_integer(1)(name, value)))


def _raise_all(errors: list[Exception]) -> None:
    if not errors:
        return
    kind = TypeError if all(isinstance(error, TypeError) for error in errors) else ValueError
    raise kind("\n".join(map(str, errors)))
