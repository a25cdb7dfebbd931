"""Returned values as data: what arrives is what was returned, or the part that is no data is named."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel import ShipError
from notebook_accel.launch.transfer.plain_values import pack_plain, unpack_plain
from notebook_accel.trust.plain import MalformedError

LIMIT = 1 << 30


@dataclasses.dataclass
class Report:
    loss: float


def send(value: Any) -> Any:
    """Return a value after its way: its parts arrive as bytes."""
    return unpack_plain([bytearray(memoryview(part)) for part in pack_plain(value, LIMIT)])


DATA = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=15,
)


@settings(max_examples=100)
@given(DATA)
def test_data_arrives(value: Any) -> None:
    found = send(value)
    assert found == value and repr(found) == repr(value)


def test_kinds_of_data() -> None:
    value = {
        ("a", 1): {1, 2},
        "b": frozenset("x"),
        None: bytearray(b"z"),
        2.5: torch.Size([2, 3]),
        "d": torch.bfloat16,
    }
    found = send(value)
    assert found == value and type(found["b"]) is frozenset and type(found[2.5]) is torch.Size
    assert send(torch.device("cpu")) == torch.device("cpu")
    assert send(OrderedDict(b=1, a=2)) == OrderedDict(b=1, a=2)
    assert send(10**400) == 10**400


def test_tensors_arrive() -> None:
    kinds = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    )
    for kind in kinds:
        for shape in ((), (3,), (0, 4), (2, 3)):
            tensor = (
                torch.arange(6).reshape(2, 3).to(kind) if shape == (2, 3) else torch.ones(shape, dtype=kind)
            )
            found = send(tensor)
            assert found.dtype is kind and torch.equal(found, tensor)
            found.zero_()
    view = torch.arange(12.0).reshape(3, 4).t()[1:]
    assert torch.equal(send(view), view)
    assert torch.equal(send(torch.tensor([1 + 2j]).conj()), torch.tensor([1 - 2j]))
    leaf = torch.ones(2, requires_grad=True)
    assert send(leaf).requires_grad and not send(leaf * 2).requires_grad


def test_a_state_dict_loads_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    found = send({"model": model.state_dict(), "step": 3})["model"]
    assert type(found) is OrderedDict and found._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).load_state_dict(found)
    parameter = send(dict(model.named_parameters()))["0.weight"]
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


def test_arrays_arrive() -> None:
    arrays = [
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "bc"]),
        np.array(["2024-01-01"], "M8[D]"),
        np.array([True, False]),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array([b"x"]),
    ]
    for array in arrays:
        found = send(array)
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    assert send(np.float32(1.5)) == np.float32(1.5) and type(send(np.float32(1.5))) is np.float32
    assert send(np.bool_(True)) is np.True_
    for text in (np.str_(""), np.str_("a\0"), np.bytes_(b""), np.bytes_(b"ab\0")):
        found = send(text)
        assert type(found) is type(text) and found == text and len(found) == len(text)


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (Report(0.5), "the returned value", "Report"),
        ([1, {"a": Report(0.5)}], "the returned value -> [1] -> ['a']", "Report"),
        ({Path("x"): 1}, "the returned value -> a key", "Path"),
        (np.array([object()]), "the returned value", "numpy.ndarray"),
        (print, "the returned value", "builtin_function_or_method"),
        (torch.ones(2, device="meta"), "the returned value", "torch.Tensor"),
        (torch.eye(2).to_sparse(), "the returned value", "torch.Tensor"),
    ],
)
def test_what_is_no_data_is_named(value: Any, path: str, kind: str) -> None:
    with pytest.raises(ShipError) as caught:
        pack_plain(value, LIMIT)
    text = str(caught.value)
    assert text.startswith(f"{path} cannot be sent to the other nodes: it is a ") and kind in text
    assert "NOTEBOOK_ACCEL_SECRET_FILE" in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_named() -> None:
    with pytest.raises(ShipError, match=r"it is a torch\.Tensor"):
        pack_plain(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), LIMIT)


def test_what_has_no_end_and_what_is_too_large_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ShipError, match="it is nested too deeply, 100 values in each other are") as caught:
        pack_plain(endless, LIMIT)
    assert len(str(caught.value)) < 250
    with pytest.raises(ShipError, match=r"take 0.000976562 GiB at most .* give all nodes the same secret"):
        pack_plain(torch.zeros(1 << 20), 1 << 20)


@pytest.mark.parametrize(
    ("tree", "buffers"),
    [
        (["tensor", "float32", [1 << 40], False, False, 0], [b"1234"]),
        (["tensor", "float32", [1], False, False, -1], [b"1234"]),
        (["tensor", "Tensor", [1], False, False, 0], [b"1234"]),
        (["tensor", "int64", [1], True, False, 0], [b"12345678"]),
        (["array", "|O8", [1], True, 0], [b"12345678"]),
        (["array", "<U0", [1 << 40], True, 0], [b""]),
        (["array", "|O8", [], False, 0], [b"12345678"]),
        (["list", [["bytes", 0], ["bytes", 0]]], [b"twice"]),
        (["dict", [[["list", []], 1]]], []),
        (["unpack", 1], []),
        ([[], 1], []),
        ([], []),
        ({"a": 1}, []),
        (["int", "zz"], []),
        (["device", "a file"], []),
        (["size", ["x"]], []),
        (["array", "<f4", [1], True, 0], []),
    ],
)
def test_made_up_values_are_refused(tree: Any, buffers: list[bytes]) -> None:
    with pytest.raises(MalformedError):
        unpack_plain([json.dumps(tree).encode(), *buffers])


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "made",)

    with pytest.raises(MalformedError):
        unpack_plain([pickle.dumps(Touch())])
    assert not (tmp_path / "made").exists()


WORDS = [
    "list",
    "tuple",
    "dict",
    "tensor",
    "array",
    "bytes",
    "float32",
    "<f4",
    "set",
    "ordered dict",
]
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=15,
)


@settings(max_examples=300)
@given(
    TREES.map(lambda tree: json.dumps(tree).encode()) | st.binary(max_size=40),
    st.lists(st.binary(max_size=16), max_size=2),
)
def test_any_parts_are_a_value_or_refused(first: bytes, buffers: list[bytes]) -> None:
    tracemalloc.start()
    try:
        unpack_plain([first, *buffers])
    except MalformedError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20
