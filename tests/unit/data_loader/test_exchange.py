"""Batches on their way to the ranks: each gets its part, with as few messages as their structure allows."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import torch

from notebook_accel import nested
from notebook_accel.comm.torch_dist import TorchComm
from notebook_accel.data_loader.exchange import Exchange, Round
from tests.unit.data_loader.test_data_loader import CPU, install_gloo
from tests.unit.multiprocess import run_ranks


class Pair(NamedTuple):
    x: torch.Tensor
    names: list[str]


class Logged(TorchComm):
    """Notes its messages."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.messages: list[str] = []

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self.messages.append("numbers" if tensor.dtype == torch.int64 else "pickled")
        return super().broadcast(tensor, src)

    def scatter(self, tensor: torch.Tensor, parts: Any, src: int = 0) -> torch.Tensor:
        self.messages.append("tensors")
        return super().scatter(tensor, parts, src)


NUMBERS = torch.arange(12.0)
# batches of 4 samples, and whether their structure is another one than that of the batch before
BATCHES: dict[str, tuple[Any, bool]] = {
    "first": ({"x": NUMBERS.view(4, 3), "y": [torch.arange(4), True]}, True),
    "alike": ({"x": NUMBERS.view(4, 3) + 1, "y": [torch.arange(4) + 1, True]}, False),
    "strided": ({"x": NUMBERS.view(3, 4).t(), "y": [torch.arange(8)[::2], True]}, False),
    "longer": ({"x": NUMBERS.view(4, 3), "y": [torch.arange(9), True]}, False),
    "another shape": ({"x": NUMBERS[:8].view(4, 2), "y": [torch.arange(4), True]}, True),
    "another dtype": ({"x": NUMBERS[:8].view(4, 2), "y": [torch.arange(4, dtype=torch.int16), True]}, True),
    "another value": ({"x": NUMBERS[:8].view(4, 2), "y": [torch.arange(4, dtype=torch.int16), None]}, True),
    "another key": ({"x": NUMBERS[:8].view(4, 2), "z": [torch.arange(4, dtype=torch.int16), None]}, True),
    "a named tuple": (Pair(torch.ones(4, dtype=torch.bool), ["a", "b"]), True),
    "other words": (Pair(torch.ones(4, dtype=torch.bool), ["c", "d"]), True),
    "a mapping": (collections.OrderedDict(b=torch.ones(4), a=torch.zeros(4, dtype=torch.complex64)), True),
    "empty rows": (torch.empty(4, 0), True),
    "one tensor": (torch.arange(4), True),
}
# what has no equal parts travels whole
WHOLE: dict[str, Any] = {
    "no dimensions": {"x": torch.arange(4), "y": torch.tensor(1.0)},
    "too short": {"x": torch.arange(4), "y": torch.ones(3)},
    "sparse": torch.eye(4).to_sparse(),
    "words alone": ["a", "b"],
}


def exchange_all() -> dict[str, Any]:
    rank = install_gloo()
    comm = Logged()
    exchange = Exchange(comm, [0, 1])
    seen: dict[str, Any] = {}

    def pass_on(name: str, sent: Any) -> None:
        comm.messages.clear()
        seen[name] = (exchange(sent if rank == 0 else None), list(comm.messages))

    for name, (batch, _) in BATCHES.items():
        pass_on(name, Round(batch=batch, num_samples=4, is_last=name == "one tensor", share=2))
    for name, batch in WHOLE.items():
        pass_on(name, Round(batch=batch, num_samples=4, is_last=False, share=2))
    pass_on("again", Round(batch=torch.arange(4), num_samples=4, is_last=False, share=2))
    pass_on("no share", Round(batch=torch.arange(4), num_samples=4, is_last=False))
    pass_on("a failure", "OSError: no such disk")
    try:
        pass_on(
            "no pickle", Round(batch=[torch.arange(4), lambda: None], num_samples=4, is_last=False, share=2)
        )
    except Exception as error:
        seen["no pickle"] = type(error).__name__
    pass_on("the end", None)
    exchange = Exchange(comm, [0, 0])
    pass_on("one part", Round(batch=[torch.arange(3), torch.tensor(1.0)], num_samples=None, is_last=True))
    large = exchange(Round(batch=[torch.ones(1000), torch.ones(1)], num_samples=None, is_last=True))
    if rank == 1:
        assert isinstance(large, Round)
        seen["storage"] = large.batch[1].untyped_storage().nbytes()
    return seen


def test_each_rank_gets_its_part() -> None:
    first, second = run_ranks(exchange_all)
    for name, (batch, is_new) in BATCHES.items():
        (sent, messages), (received, heard) = first[name], second[name]
        assert heard == messages, name
        assert messages == ["numbers"] + ["pickled"] * is_new + ["tensors"] * (name != "empty rows"), name
        nested_equal(sent.batch, batch)
        nested_equal(received.batch, nested.slice_tensors(batch, slice(2, 4)))
        assert type(received.batch) is type(batch)
        assert received.is_part and received.num_samples == 4 and received.is_last == (name == "one tensor")
    for name, batch in WHOLE.items():
        received, messages = second[name]
        assert messages == ["numbers", "pickled"] and not received.is_part, name
        nested_equal(received.batch, batch)
    assert second["again"][1] == ["numbers", "tensors"], "the structure is still known"
    assert not second["no share"][0].is_part
    assert second["a failure"][0] == "OSError: no such disk"
    assert second["no pickle"][0].startswith(first["no pickle"]), "rank 1 hears why"
    assert second["the end"][0] is None
    received, _ = second["one part"]
    nested_equal(received.batch, [torch.arange(3), torch.tensor(1.0)])
    assert received.num_samples is None and received.is_last
    assert second["storage"] == 4, "a tensor that is kept does not keep the others"


def nested_equal(seen: Any, expected: Any) -> None:
    for ours, theirs in zip(nested.leaves_of(seen), nested.leaves_of(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        else:
            assert ours == theirs
