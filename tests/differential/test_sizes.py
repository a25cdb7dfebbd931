"""Sizes as texts, and dtypes that torch does not have, beside Accelerate's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel.utils import modeling as ours
from notebook_accel.utils import other as ours_other

accelerate = pytest.importorskip("accelerate")
import accelerate.utils.dataclasses as their_classes  # noqa: E402
import accelerate.utils.modeling as theirs  # noqa: E402


def answer(function: Any, *arguments: Any, **named: Any) -> Any:
    """Return what a function returns, or the kind of its error."""
    try:
        return function(*arguments, **named)
    except ValueError:
        return ValueError


@pytest.mark.parametrize(
    "number", ["2", " 2 ", "0.5", ".5", "2.", "1e3", "1E-1", "-1", "", ".", "two", "nan", "0", "1e", "7"]
)
@pytest.mark.parametrize(
    "unit",
    ["GB", "Gb", "gb", "gB", "MB", "Mb", "mb", "KB", "kb", "GiB", "Gib", "gib", "MiB", "KiB", "B", "", "GBB"],
)
def test_sizes_as_texts(number: str, unit: str) -> None:
    assert answer(ours.convert_file_size_to_int, number + unit) == answer(
        theirs.convert_file_size_to_int, number + unit
    )


def make_net() -> nn.Module:
    """Return a net with sizes that do not divide, and a buffer of whole numbers."""
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 7, bias=False)))


pytestmark = pytest.mark.filterwarnings("ignore")
FORMATS: list[Any] = [
    "FP8",
    "INT4",
    "INT2",
    torch.int8,
    torch.float16,
    "float16",
    "torch.bfloat16",
    torch.float64,
]


def of(classes: Any, wanted: Any) -> Any:
    """Return one of the library's own formats by its name, and all else as it is."""
    return getattr(classes.CustomDtype, wanted) if isinstance(wanted, str) and wanted.isupper() else wanted


@pytest.mark.parametrize("wanted", FORMATS, ids=str)
def test_formats_that_torch_lacks(wanted: Any) -> None:
    net, own, other = make_net(), of(ours_other, wanted), of(their_classes, wanted)
    assert ours.compute_module_sizes(net, dtype=own) == theirs.compute_module_sizes(net, dtype=other)
    special = ("0.bias", "2.0.weight", "1.num_batches_tracked")
    assert ours.compute_module_sizes(
        net, special_dtypes=dict.fromkeys(special, own)
    ) == theirs.compute_module_sizes(net, special_dtypes=dict.fromkeys(special, other))
    for limit in (30, "64KB", 80.0):
        memory = {0: limit, "cpu": 60 if limit == 30 else 10**6, "disk": 10**6}
        whole = {name: int(size) if isinstance(size, float) else size for name, size in memory.items()}
        assert ours.infer_auto_device_map(net, memory, dtype=own) == theirs.infer_auto_device_map(
            net, whole, dtype=other
        )
    if isinstance(other, (their_classes.CustomDtype, torch.dtype)):
        assert ours.dtype_byte_size(own) == theirs.dtype_byte_size(other)


def test_the_formats_are_accelerates() -> None:
    assert [(item.name, item.value) for item in ours_other.CustomDtype] == [
        (item.name, item.value) for item in their_classes.CustomDtype
    ]


def test_tensors_cannot_have_them() -> None:
    with pytest.raises(ValueError, match="is unknown, choose a dtype of torch"):
        ours.set_module_tensor_to_device(nn.Linear(1, 1), "weight", "cpu", dtype=ours_other.CustomDtype.INT4)  # type: ignore[arg-type]
