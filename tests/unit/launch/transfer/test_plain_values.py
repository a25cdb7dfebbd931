"""Returned values as data: what arrives is what was returned, or the part that is no data is named."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel import ShipError
from notebook_accel.launch.transfer import plain_values
from notebook_accel.launch.transfer.plain_values import pack_plain, unpack_plain
from notebook_accel.trust.plain import MalformedError

LIMIT = 1 << 30


@dataclasses.dataclass
class Report:
    loss: float


def send(value: Any) -> Any:
    """Return a value after its way: it arrives as bytes."""
    return unpack_plain(bytes(pack_plain(value, LIMIT)))


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
    assert send(leaf).requires_grad and send(leaf * 2).is_leaf


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
    for text in (np.str_("a"), np.bytes_(b"ab")):
        found = send(text)
        assert type(found) is type(text) and found == text and len(found) == len(text)
    assert [each.tolist() for each in send([arrays[0], arrays[0][:1]])] == [
        arrays[0].tolist(),
        arrays[0][:1].tolist(),
    ]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Report(0.5), "test_plain_values.Report"),
        ([1, {"a": Report(0.5)}], "test_plain_values.Report"),
        ({Path("x"): 1}, "pathlib"),
        (np.array([object()]), "builtins.object"),
        (print, "builtins.print"),
        (lambda: 1, "lambda"),
    ],
)
def test_what_is_no_data_is_named(value: Any, kind: str) -> None:
    with pytest.raises(ShipError) as caught:
        pack_plain(value, LIMIT)
    text = str(caught.value)
    assert text.startswith("the returned value cannot be sent to the other nodes: ") and kind in text
    assert "NOTEBOOK_ACCEL_SECRET_FILE" in text


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ShipError, match=r"take 0.000976562 GiB at most .* give all nodes the same secret"):
        pack_plain(torch.zeros(1 << 20), 1 << 20)


class Made:
    """A value whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def make_up(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_made_up_values_are_refused(tmp_path: Path) -> None:
    content = torch.zeros(8, dtype=torch.uint8)
    compressed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(make_up(1))) as old, zipfile.ZipFile(compressed, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    for data in (
        make_up(Made(Path.touch, tmp_path / "made")),
        make_up(Made(eval, "1")),
        make_up(Made(plain_values._make_array, "|O8", (1,), True, content)),
        make_up(Made(plain_values._make_array, "<U0", (1 << 40,), True, content)),
        make_up(Made(plain_values._make_array, "<f4", (1 << 40,), True, content)),
        pickle.dumps(Made(Path.touch, tmp_path / "made")),
        compressed.getvalue(),
        b"",
    ):
        with pytest.raises(MalformedError):
            unpack_plain(data)
    assert not (tmp_path / "made").exists()


def test_a_tensor_is_not_larger_than_what_came() -> None:
    storage = torch.zeros(1).untyped_storage()
    rebuild = torch._utils._rebuild_tensor_v2
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    data = make_up(Made(rebuild, typed, 0, (1 << 33,), (1,), False, OrderedDict()))
    with pytest.raises(MalformedError):
        unpack_plain(data)


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 2_000))
def test_any_bytes_are_a_value_or_refused(change: bytes, at: int) -> None:
    data = bytearray(make_up({"a": torch.ones(3), "b": [1, 2.5, "x"]}))
    data[at : at + len(change)] = change
    with contextlib.suppress(MalformedError):
        unpack_plain(data)
