"""Finding a batch size that fits, and giving memory back."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import accelerate.utils as theirs
import accelerate.utils.memory as their_memory
import pytest
import torch

from notebook_accel import debug_launcher, find_executable_batch_size
from notebook_accel.accelerator import Accelerator
from notebook_accel.memory import clear_device_cache, release_memory, should_reduce_batch_size

MESSAGES = (
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "XPU out of memory. Tried to allocate 2.00 GiB",
    "HIP out of memory. Tried to allocate",
    "MPS backend out of memory (MPS allocated: 1 GB)",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if",
    "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate",
)


def test_the_errors_of_accelerate_and_more_are_known() -> None:
    for text in MESSAGES:
        assert should_reduce_batch_size(RuntimeError(text)) and their_memory.should_reduce_batch_size(
            RuntimeError(text)
        )
    for error in (
        RuntimeError("shape mismatch"),
        ValueError(MESSAGES[0]),
        RuntimeError(),
        RuntimeError(1, 2),
    ):
        assert not should_reduce_batch_size(error) and not their_memory.should_reduce_batch_size(error)
    for error in (
        torch.OutOfMemoryError(),
        MemoryError(),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ):
        assert should_reduce_batch_size(error)


def test_a_real_failure_of_the_cpu_allocator() -> None:
    @find_executable_batch_size(starting_batch_size=2**50)
    def fill(batch_size: int) -> int:
        return torch.empty(batch_size * 2**3, dtype=torch.uint8).numel() if batch_size > 2**20 else batch_size

    assert fill.__wrapped__(8) == 8
    with pytest.raises(RuntimeError) as caught:
        fill.__wrapped__(2**50)
    assert should_reduce_batch_size(caught.value)


@pytest.mark.parametrize("start, fits", [(24, 12), (4, 1), (3, 3)])
def test_the_sizes_are_accelerates(start: int, fits: int) -> None:
    tried: dict[Any, list[int]] = {}
    for find in (find_executable_batch_size, theirs.find_executable_batch_size):
        tried[find] = []

        @find(starting_batch_size=start)
        def train(batch_size: int, word: str, find: Any = find) -> tuple[int, str]:
            tried[find].append(batch_size)
            if batch_size > fits:
                raise RuntimeError(MESSAGES[0])
            return batch_size, word

        first = train("a")
        assert train("b") == (first[0], "b")
    ours, other = tried.values()
    assert ours == other and ours[-1] == ours[-2], "the second call starts with the size that worked"


def test_a_function_of_ones_own_reduces() -> None:
    left = iter((5, 2))

    @find_executable_batch_size(starting_batch_size=9, reduce_batch_size_fn=lambda: next(left))
    def train(batch_size: int) -> int:
        if batch_size > 2:
            raise MemoryError
        return batch_size

    assert train() == 2

    @find_executable_batch_size(starting_batch_size=9, reduce_batch_size_fn=lambda: 9)
    def stuck(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(ValueError, match="returned 9 after batch size 9: it must return a smaller int"):
        stuck()


def test_nothing_fits() -> None:
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        raise RuntimeError(MESSAGES[0])

    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="train found no batch size that fits into memory; tried: 4, 3, 2, 1"
        ) as e:
            train()
        assert "CUDA out of memory" in str(e.value.__cause__)
    with pytest.raises(RuntimeError, match="starting_batch_size is 0"):
        find_executable_batch_size(train.__wrapped__, starting_batch_size=0)()


def test_other_errors_pass() -> None:
    calls = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train()
    assert calls == [128]


def test_what_a_failed_call_held_is_free_before_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> None:
        assert all(reference() is None for reference in held)
        activations = torch.zeros(batch_size)
        held.append(weakref.ref(activations))
        try:
            raise RuntimeError(MESSAGES[0])
        except RuntimeError as error:
            if batch_size > 1:
                raise RuntimeError(MESSAGES[1]) from error

    train()
    assert len(held) == 3


def test_wrong_use_is_explained() -> None:
    @find_executable_batch_size
    def train(batch_size: int, model: str, lr: float = 0.1) -> None:
        raise AssertionError("must not be called")

    with pytest.raises(
        TypeError, match=r"passes the batch size itself, so call train\(model='net', lr=0\.5\)"
    ):
        train(128, "net", 0.5)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        train()
    assert str(inspect.signature(train)) == "(model: 'str', lr: 'float' = 0.1) -> 'None'"
    assert train.__name__ == "train"
    with pytest.raises(TypeError, match="must take the batch size as its first argument"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(TypeError, match=r"is an int, not 1\.5"):
        find_executable_batch_size(starting_batch_size=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1 is negative"):
        find_executable_batch_size(starting_batch_size=-1)

    class Trainer:
        @find_executable_batch_size
        def train(self, batch_size: int) -> None:
            raise AssertionError("must not be called")

    with pytest.raises(TypeError, match="train is a method"):
        Trainer().train()


def launched(word: str) -> tuple[str, int, int]:
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        if batch_size > 10:
            raise RuntimeError(MESSAGES[0])
        return batch_size

    return word, train(), accelerator.num_processes


@find_executable_batch_size(starting_batch_size=16)
def launched_itself(batch_size: int, word: str) -> tuple[str, int]:
    if batch_size > 10:
        raise RuntimeError(MESSAGES[0])
    return word, batch_size


def test_inside_a_launch() -> None:
    assert debug_launcher(launched, ("x",)) == ("x", 10, 2)
    assert debug_launcher(launched_itself, ("x",)) == ("x", 10)
    with pytest.raises((TypeError, ValueError), match="too many positional arguments"):
        debug_launcher(launched_itself, (16, "x"))


def test_release() -> None:
    tensor = torch.zeros(2)
    gone = weakref.ref(tensor)
    tensor = release_memory(tensor)[0]  # type: ignore[assignment]
    assert gone() is None and tensor is None
    assert release_memory(1, "a") == theirs.release_memory(1, "a") == [None, None]
    clear_device_cache()
    assert not torch.cuda.is_initialized()
