"""Weights arrive whole through the buffers of a staging, whatever their size, type and class."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from notebook_accel.hooks import staging
from notebook_accel.hooks.staging import Staging

CPU = torch.device("cpu")
PART, SMALL = 1 << 12, 1 << 8
SIZES = [0, 8, SMALL, PART, 2 * PART + 16, 5 * PART]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PART", PART)
    monkeypatch.setattr(staging, "_SMALL", SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_tensor_arrives_whole(nbytes: int, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (nbytes // dtype.itemsize,), dtype=torch.int8).to(dtype)
    sent = Staging(CPU).send(tensor)
    assert sent.dtype == dtype and torch.equal(sent, tensor)


def test_shapes_stay_and_what_is_not_contiguous_arrives_too() -> None:
    tensor = torch.rand(100, 150)
    own = Staging(CPU)
    assert torch.equal(own.send(tensor), tensor) and torch.equal(own.send(tensor.t()), tensor.t())


def test_a_parameter_is_sent_without_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.rand(PART))
    sent = Staging(CPU).send(parameter)
    assert not sent.requires_grad and torch.equal(sent, parameter)


def test_threads_share_it() -> None:
    own = Staging(CPU)
    tensors = [torch.full((6 * PART,), float(number)) for number in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(own.send, tensors), tensors))


def test_the_first_forward_may_be_in_inference_mode() -> None:
    own, tensor = Staging(CPU), torch.rand(PART)
    with torch.inference_mode():
        first = own.send(tensor)
    with ThreadPoolExecutor(1) as pool:  # which is in no such mode
        again = pool.submit(own.send, tensor).result()
    assert torch.equal(first, tensor) and torch.equal(again, tensor)


class Doubled(torch.Tensor):
    """A tensor whose values are twice those that it holds, as classes of quantized weights compute theirs."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return Doubled(args[0].held.clone())
        return func(
            *[each.held * 2 if isinstance(each, Doubled) else each for each in args], **(kwargs or {})
        )


@pytest.mark.filterwarnings("ignore")
def test_classes_of_libraries_stay() -> None:
    tensor = Doubled(torch.ones(PART))
    sent = Staging(CPU).send(tensor)
    assert type(sent) is Doubled and torch.equal(sent.held, tensor.held)


@pytest.mark.parametrize(
    "tensor", [torch.ones(PART, dtype=torch.complex64).conj(), torch.ones(PART)._neg_view()]
)
def test_views_that_compute_keep_their_values(tensor: torch.Tensor) -> None:
    assert torch.equal(Staging(CPU).send(tensor), tensor)


def test_without_page_locked_memory_weights_arrive_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[torch.device] = []

    def refuse(device: torch.device) -> Any:
        tries.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(staging, "_Buffer", refuse)
    own, tensor = Staging(CPU), torch.rand(PART)
    assert all(torch.equal(own.send(tensor), tensor) for _ in range(2)) and len(tries) == 1


def test_only_gpus_of_cuda_have_a_way_of_their_own() -> None:
    assert staging.is_for(torch.device("cuda", 1)) and not staging.is_for(CPU)
