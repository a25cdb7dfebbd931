"""Memory that is meant to be shared, in workers that are fresh processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel import PartialState, notebook_launcher
from notebook_accel.errors import ShipError
from notebook_accel.launch.transfer.unpicklable import pack_job
from tests import forker
from tests.structure.source import ROOT

Array = Callable[[], Any]
launch = functools.partial(
    notebook_launcher, num_processes=2, start_method="fresh", returns="all", view="none"
)


def fill(shared: Any) -> list[float]:
    """Write to the place of this rank; return what all have written."""
    state = PartialState()
    shared[state.process_index] = state.process_index + 1
    state.wait_for_everyone()
    return [float(shared[0]), float(shared[1])]


def make_array() -> Any:
    return multiprocessing.Array("d", 2, lock=False)


KEPT = make_array()
"""The heap of multiprocessing keeps the file where this lies; it is there before a test looks for open files."""
MEMORY: dict[str, Array] = {
    "tensor": lambda: torch.zeros(2).share_memory_(),
    "view of a tensor": lambda: torch.zeros(9, 3).share_memory_()[4:6, 1],
    "tensor with an attribute": lambda: mark(torch.zeros(2).share_memory_()),
    "Array": make_array,
    "Array of torch": lambda: torch.multiprocessing.Array("i", 2, lock=False),
    "array of an Array": lambda: np.frombuffer(make_array()),
    "part of an Array": lambda: np.ctypeslib.as_array(multiprocessing.Array("d", 9, lock=False))[8:2:-3],
}


def mark(tensor: torch.Tensor) -> torch.Tensor:
    tensor.name_of_mine = "a"  # type: ignore[attr-defined]
    return tensor


def test_what_a_rank_writes_all_see() -> None:
    shared = {kind: make() for kind, make in MEMORY.items()}
    for _ in range(2):  # a second launch is another pickle of the same memory
        for value in shared.values():
            value[0] = value[1] = 0
        expected = {kind: [1, 2] for kind in MEMORY}
        assert launch(lambda: {kind: fill(value) for kind, value in shared.items()}) == [expected] * 2
        assert {kind: [float(value[0]), float(value[1])] for kind, value in shared.items()} == expected


def test_a_private_tensor_and_array_stay_private() -> None:
    multiprocessing.Value("d", lock=False)  # from now on multiprocessing knows how to pickle one of its own
    values = [torch.zeros(2), np.zeros(2), np.frombuffer((ctypes.c_double * 2)())]
    number = ctypes.c_double(5)
    expected = [[[1, 0]] * 3 + [5], [[0, 2]] * 3 + [5]]
    assert launch(lambda: [*(fill(value) for value in values), number.value]) == expected
    assert [float(value[0]) for value in values] == [0] * 3


def test_a_module_a_value_and_what_shares_with_them() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2)).share_memory()
    value = multiprocessing.Value("i", 5, lock=False)
    weight = module[0].weight.detach()

    def work(again: torch.Tensor) -> tuple[Any, ...]:
        state = PartialState()
        if state.is_main_process:
            again.fill_(7)
            module[1].running_mean.fill_(8)
            value.value += 1
        state.wait_for_everyone()
        assert again.is_shared() and isinstance(module[0].weight, torch.nn.Parameter)
        return module[0].weight.tolist(), module[1].running_mean.tolist(), value.value

    expected = [[7.0], [7.0]], [8.0, 8.0], 6
    assert launch(work, (weight,)) == [expected] * 2
    assert (module[0].weight.tolist(), module[1].running_mean.tolist(), value.value) == expected


def test_one_tensor_that_comes_twice_stays_one() -> None:
    tensor = torch.zeros(4).share_memory_()
    pickled = pack_job(len, (tensor, tensor, tensor[2:], torch.nn.Parameter(tensor)), "len", share=True)
    assert len(pickled.shared) == 1
    os.close(pickled.shared[0])
    assert all(launch(lambda first, second: first is second, (tensor, tensor)))


BY_NAME = """
import os, struct, torch
from notebook_accel import PartialState, notebook_launcher

torch.multiprocessing.set_sharing_strategy("file_system")
tensors = [torch.zeros(2).share_memory_() for _ in range(300)]

def fill():
    state = PartialState()
    tensors[9][state.process_index] = state.process_index + 1
    state.wait_for_everyone()
    return tensors[9].tolist(), all(tensor.is_shared() for tensor in tensors)

def launch(function):
    return notebook_launcher(function, num_processes=2, start_method="fresh", returns="all", view="none")

def read_counts():
    names = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    return [struct.unpack("i", open(f"/dev/shm/{name}", "rb").read(4))[0] for name in names]

print(launch(fill))
try:
    launch(lambda: tensors[0].is_shared() and os.kill(os.getpid(), 9))
except Exception as error:
    print(type(error).__name__)
tensors[9].zero_()
print(launch(fill), tensors[9].tolist(), read_counts() == [1] * 300)
"""


def test_tensors_that_are_shared_by_name(tmp_path: Path) -> None:
    """The names are there for the next launch, whatever has become of workers; only the notebook is counted."""
    command = [sys.executable, "-c", BY_NAME]
    done = forker.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240)
    filled = "[([1.0, 2.0], True), ([1.0, 2.0], True)]"
    assert done.stdout.splitlines() == [filled, "WorkerKilledError", f"{filled} [1.0, 2.0] True"], done.stderr


def test_shared_memory_by_its_name_is_not_removed_by_a_workers_end() -> None:
    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        for _ in range(2):
            assert launch(lambda: fill(memory.buf)) == [[1, 2], [1, 2]]
            assert bytes(memory.buf[:2]) == b"\1\2"
            memory.buf[:2] = b"\0\0"
    finally:
        memory.close()
        memory.unlink()
    assert memory.name not in os.listdir("/dev/shm")


@pytest.mark.parametrize("mode", ["w+", "r+"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_mapped_file_is_mapped_again(mode: Any, order: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    mapped = np.memmap(tmp_path / "file", np.int16, mode, 6, (3, 4), order)
    views = [mapped, mapped[1], mapped[1:, ::-2].T, np.asarray(mapped)[2], np.asarray(memoryview(mapped))[1:]]

    def work() -> list[Any]:
        state = PartialState()
        if state.process_index:
            mapped[:] = np.arange(12).reshape(3, 4)
            mapped.flush()
        state.wait_for_everyone()
        assert [type(view) for view in views] == [np.memmap] * 3 + [np.ndarray] * 2
        assert views[0] is mapped and mapped.filename == tmp_path / "file" and mapped.offset == 6
        return [view.tolist() for view in views]

    assert launch(work) == [[view.tolist() for view in views]] * 2
    assert mapped[2].tolist() == [8, 9, 10, 11]


def test_a_mapped_file_that_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    mapped, private = (np.memmap(tmp_path / "file", mode=mode) for mode in ("r", "c"))
    private[1] = 5

    def work() -> list[float]:
        assert not mapped.flags.writeable and not mapped[9:].flags.writeable
        return fill(private)

    pickled = pack_job(work, (mapped, mapped[5:]), "work", share=True)
    assert len(pickled.data) + sum(memoryview(part).nbytes for part in pickled.buffers) < 3 << 19
    assert launch(work) == [[1, 5], [0, 2]]
    assert private[:2].tolist() == [0, 5] and not mapped.any()


def test_a_file_that_is_gone_arrives_as_a_copy(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "file", mode="w+", shape=(2,))
    (tmp_path / "file").unlink()
    assert launch(fill, (mapped,)) == [[1, 0], [0, 2]]


def test_files_that_torch_maps(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8))
    shared, private = (torch.from_file(str(tmp_path / "file"), flag, 2) for flag in (True, False))
    assert launch(lambda: (fill(private), fill(shared))) == [([1, 0], [1, 2]), ([0, 2], [1, 2])]
    assert shared.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (multiprocessing.Lock, "synchronize.Lock"),
        (multiprocessing.Queue, "queues.Queue"),
        (multiprocessing.SimpleQueue, "queues.SimpleQueue"),
        (lambda: multiprocessing.Value("i", 0), "sharedctypes.Synchronized"),
    ],
)
def test_locks_and_queues_are_refused_by_name(make: Array, name: str) -> None:
    tensor = torch.zeros(2).share_memory_()
    held = {"tensor": tensor, "refused": make()}
    with pytest.raises(
        ShipError,
        match=rf"^args\[0\] -> \['refused'\] cannot .* multiprocessing.{name} object .*through inheritance",
    ):
        pack_job(len, (held,), "len", share=True)
    assert count_descriptors(tensor) == 1


def test_more_tensors_than_one_message_carries() -> None:
    tensors = [torch.ones(1).share_memory_() for _ in range(300)]
    assert launch(sum, (tensors,)) == [torch.full((1,), 300.0)] * 2
    assert count_descriptors(tensors[0]) == 1


def test_a_launch_leaves_no_descriptors() -> None:
    tensor = torch.zeros(2).share_memory_()
    launch(fill, (tensor,))
    assert count_descriptors(tensor) == 1


def count_descriptors(tensor: torch.Tensor) -> int:
    """Return how many descriptors this process has of a tensor's memory; torch keeps one."""
    memory = os.fstat(tensor.untyped_storage()._share_fd_cpu_()[0])
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            count += os.path.samestat(os.fstat(int(fd)), memory)
    return count
