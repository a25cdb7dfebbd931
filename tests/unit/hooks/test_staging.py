"""Weights arrive whole through the buffers of a staging, whatever their size and type."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from notebook_accel.hooks import staging
from notebook_accel.hooks.staging import Staging

CPU = torch.device("cpu")
SIZES = [0, 7, staging._SMALL, staging._PART, 2 * staging._PART + 12, 5 * staging._PART]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_tensor_arrives_whole(nbytes: int, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (nbytes // dtype.itemsize,)).to(dtype)
    sent = Staging(CPU).send(tensor)
    assert sent.dtype == dtype and torch.equal(sent, tensor)


def test_shapes_stay_and_what_is_not_contiguous_arrives_too() -> None:
    tensor = torch.rand(1024, 1500)
    own = Staging(CPU)
    assert torch.equal(own.send(tensor), tensor) and torch.equal(own.send(tensor.t()), tensor.t())


def test_a_parameter_is_sent_without_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.rand(1 << 19))
    sent = Staging(CPU).send(parameter)
    assert not sent.requires_grad and torch.equal(sent, parameter)


def test_the_memory_of_what_was_sent_may_be_changed_at_once() -> None:
    tensor = torch.ones(1 << 20)
    sent = Staging(CPU).send(tensor)
    tensor.zero_()
    assert sent.min() == 1


def test_threads_share_it() -> None:
    own = Staging(CPU)
    tensors = [torch.full((6 << 20,), float(number)) for number in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(own.send, tensors), tensors))


def test_only_gpus_of_cuda_have_a_way_of_their_own() -> None:
    assert staging.is_for(torch.device("cuda", 1)) and not staging.is_for(CPU)
