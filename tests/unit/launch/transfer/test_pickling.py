"""What travels to a worker and back."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel import notebook_launcher
from notebook_accel.errors import LaunchError, ShipError
from notebook_accel.launch.transfer.pickling import pack, unpack
from notebook_accel.launch.transfer.shared_memory import SharedPickle
from notebook_accel.launch.transfer.unpicklable import pack_job, pack_value
from tests.unit.default_device import make_default

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def _travel(value: object, *, to_cpu: bool = True) -> Any:
    pickled = pack(value, to_cpu=to_cpu)
    return unpack(pickled.data, [bytearray(memoryview(part)) for part in pickled.buffers])


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_tensors_arrive_as_they_were(shape: list[int], dtype: torch.dtype, transpose: bool) -> None:
    tensor = torch.zeros(shape).to(dtype) if dtype is not torch.int64 else torch.randint(0, 9, tuple(shape))
    tensor = tensor.t() if transpose and tensor.dim() == 2 else tensor
    back = _travel(tensor)
    assert back.dtype == dtype and back.shape == tensor.shape and back.stride() == tensor.stride()
    assert torch.equal(
        back.view(torch.uint8) if dtype is torch.float8_e4m3fn and back.dim() else back.float().real,
        tensor.view(torch.uint8) if dtype is torch.float8_e4m3fn and tensor.dim() else tensor.float().real,
    )


def test_memory_is_shared_as_before_and_not_copied_into_the_pickle() -> None:
    base = torch.zeros(1_000_000)
    pickled = pack({"base": base, "view": base[10:20], "again": base, "array": np.ones(1_000_000)})
    assert len(pickled.data) < 5_000
    assert len(pickled.buffers) == 2
    back = unpack(pickled.data, [bytearray(memoryview(part)) for part in pickled.buffers])
    back["view"].fill_(7)
    assert back["base"][10].item() == 7 and back["again"] is back["base"]


def test_kinds_of_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    leaf = torch.ones(2, requires_grad=True)
    back = _travel(
        [parameter, leaf, leaf * 2, torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()]
    )
    assert isinstance(back[0], torch.nn.Parameter) and back[0].requires_grad
    assert back[1].requires_grad and back[1].is_leaf
    assert not back[2].requires_grad, "a tensor with a graph arrives without it"
    assert back[3].is_sparse
    assert back[4].is_conj()
    module = _travel(torch.nn.Linear(2, 2))
    assert module.weight.requires_grad


def test_tensors_may_be_made_elsewhere_by_default() -> None:
    """`torch.set_default_device` in a cell is about the user's own tensors."""
    layer = torch.nn.Linear(2, 2)
    with make_default("meta"):
        back = _travel(layer)
    assert back.weight.device.type == "cpu" and torch.equal(back.weight, layer.weight)


def test_tied_weights_stay_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    back = _travel(model)
    assert back[0].weight is back[1].weight


def test_a_segment_is_private_to_each_that_opens_it() -> None:
    array = np.zeros(10_000)
    segment = SharedPickle(pack((array, torch.zeros(5), "text")))
    twin = SharedPickle.from_filenos(segment.layout, [os.dup(fd) for fd in segment.filenos()])
    first, tensor, text = segment.open()
    first[0] = 1
    tensor[0] = 1
    second, other, _ = twin.open()
    assert text == "text" and second[0] == 0 and other[0] == 0 and first[0] == 1


def test_memory_that_cannot_be_written_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("os.pwrite", fail)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(
        LaunchError, match=r"bytes, for which .* no shared memory: .*; raise the limit on memory"
    ):
        SharedPickle(pack(np.zeros(10_000)))
    assert not before or len(os.listdir("/proc/self/fd")) == before


def _function_closing_over(value: object) -> Callable[[], object]:
    return lambda: value


class _Holder:
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda bad: (_function_closing_over(bad), ()), "f -> closure variable value"),
        (
            lambda bad: (_function_closing_over({"a": [0, bad]}), ()),
            "f -> closure variable value -> ['a'] -> [1]",
        ),
        (
            lambda bad: (_function_closing_over(_Holder(bad)), ()),
            "f -> closure variable value -> attribute value",
        ),
        (lambda bad: (len, (1, [bad])), "args[1] -> [0]"),
    ],
)
def test_the_part_that_does_not_pickle_is_named_with_its_path(make: Callable[[Any], Any], path: str) -> None:
    function, args = make(threading.Lock())
    with pytest.raises(ShipError, match="lock") as caught:
        pack_job(function, args, "f")
    assert str(caught.value).startswith(path + " cannot be sent")
    assert isinstance(caught.value, TypeError)


def test_a_run_is_named_and_not_what_is_in_it() -> None:
    run = notebook_launcher(len, ((),), num_processes=1, block=False)
    run.wait()
    with pytest.raises(
        ShipError, match=r"variable value cannot be sent.*\.Run object .*belongs to the process"
    ):
        pack_job(_function_closing_over(run), (), "f")


def test_a_cycle_ends_the_search() -> None:
    loop: list[Any] = [threading.Lock()]
    loop.append(loop)
    with pytest.raises(ShipError, match=r"the returned value -> \[0\]"):
        pack_value(loop)


def test_code_keeps_the_name_of_its_cell() -> None:
    """By it a traceback finds the lines, and so does what compiles functions of their source."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    source = "def outer():\n    def inner():\n        return 1\n    return inner, lambda: 2"
    exec(compile(source, "/tmp/ipykernel_1/cell.py", "exec"), cell)
    pickled = pack(cell["outer"], in_band=True)
    arrived = unpack(pickled.data, [])
    codes = [arrived.__code__, *(function.__code__ for function in arrived())]
    assert [code.co_filename for code in codes] == ["/tmp/ipykernel_1/cell.py"] * 3
    assert [code.co_firstlineno for code in codes] == [1, 2, 4]


def test_a_module_of_a_class_of_its_own_is_imported_where_it_arrives() -> None:
    def set_up() -> None:  # cloudpickle sends the modules that such a line uses
        torch.backends.cudnn.benchmark = True

    set_up.__module__ = "__main__"
    assert b"torch.backends.cudnn" in pack(set_up).data


def test_a_class_of_main_is_the_receivers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("class Mine:\n    count = 0\n    def __init__(self, x): self.x = x", main.__dict__)
    pickled = pack(main.Mine(3)).data
    main.Mine.count = 9
    back = unpack(pickled, [])
    assert type(back) is main.Mine and back.x == 3 and main.Mine.count == 9
    del main.Mine  # a receiver without it gets it by value
    assert unpack(pickled, []).x == 3
    assert pickle.loads(pickled).x == 3
