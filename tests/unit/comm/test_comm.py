"""Collectives over nested data, on two real gloo processes and in one."""

from __future__ import annotations

import atexit
import functools
import importlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel import Accelerator, PartialState, nested
from notebook_accel.comm import ops, torch_dist
from notebook_accel.comm.base import Comm
from notebook_accel.comm.single import SingleComm
from notebook_accel.errors import CollectiveError
from tests.unit.clock import PATIENCE_S
from tests.unit.multiprocess import run_ranks

WORLD = 2
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.float64]


def connect() -> Comm:
    from notebook_accel import detect

    return detect.ensure(cpu=True).comm


def stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor of which no two items are neighbours in memory, as in a column of a matrix."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def expand(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape whose rows are one in memory."""
    return tensor[:1].expand_as(tensor)


def make_tree(seed: int, rank: int) -> Any:
    """Return a tree whose structure depends on the seed and whose values depend on the rank too."""
    structure = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=structure))

    def leaf(index: int) -> torch.Tensor:
        shape = [draw(4) for _ in range(draw(4))]
        values = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(100 * rank + index))
        tensor = values.to(DTYPES[draw(len(DTYPES))])
        in_memory = [torch.clone, stride, expand, lambda tensor: tensor.transpose(0, -1)]
        return in_memory[draw(4) if shape else 0](tensor)

    leaves = [leaf(index) for index in range(draw(6))]
    return {"list": leaves[:2], "tuple": tuple(leaves[2:4]), "rest": {"x": leaves[4:]}}


def expected_gather(trees: list[Any]) -> list[torch.Tensor]:
    columns = zip(*(nested.leaves_of(tree, by_key=True) for tree in trees), strict=True)
    return [torch.cat([leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in column]) for column in columns]


# --- two processes: one launch, many cases ---------------------------------------------------------------------


class Counting:
    """Counts the collectives that torch sends while the block runs."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.count = comm, 0

    def __enter__(self) -> Counting:
        self.names = ("all_gather", "all_reduce", "broadcast", "all_gather_object")
        for name in self.names:
            original = getattr(self.comm, name)

            def counted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                self.count += 1
                return _original(*args, **kwargs)

            setattr(self.comm, name, counted)
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self.names:
            delattr(self.comm, name)


def ranks_gather() -> str:
    comm = connect()
    for seed in range(40):
        trees = [make_tree(seed, rank) for rank in range(WORLD)]
        for _ in range(3):  # the second time a layout is made, the third time it is there
            with Counting(comm) as counting:
                gathered = ops.gather(comm, trees[comm.rank])
            assert counting.count <= 1, f"seed {seed}: {counting.count} collectives"
            flat = nested.flatten(gathered)
            for ours, wanted in zip(flat.leaves, expected_gather(trees), strict=True):
                assert ours.dtype == wanted.dtype and ours.shape == wanted.shape, seed
                assert torch.equal(ours, wanted), seed
            assert flat.paths() == nested.flatten(trees[0]).paths()
    return "done"


def ranks_gather_details() -> str:
    comm = connect()
    rank = comm.rank
    assert ops.gather(comm, torch.tensor(rank)).tolist() == [0, 1]
    for _ in range(3):
        trained = [torch.full((2,), float(rank), requires_grad=True), torch.nn.Parameter(torch.ones(1))]
        result = ops.gather(comm, trained)
        assert not result[0].requires_grad and result[0].tolist() == [0, 0, 1, 1]
    result[0].add_(1)
    assert result[1].tolist() == [1, 1]
    assert ops.gather(comm, []) == [] and ops.gather(comm, {}) == {}
    for dtype in (
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
    ):  # of no backend
        scalar = torch.tensor(float(rank)).to(dtype)
        assert comm.broadcast(scalar, 1) is scalar and scalar.float() == 1
        for shape in ((2, 3), (2, 0), (0, 3)):
            tensor = torch.full(shape, float(rank)).to(dtype)
            expected = torch.cat([torch.full(shape, float(other)).to(dtype) for other in range(WORLD)])
            gathered = ops.gather(comm, tensor)
            assert gathered.dtype == dtype and gathered.float().tolist() == expected.float().tolist()
            for _ in range(3):  # the second time a layout is made
                pair = ops.gather(comm, [tensor, tensor])
                assert pair[1].float().tolist() == expected.float().tolist()
    assert ops.gather_object(comm, [rank, "x"]) == [0, "x", 1, "x"]
    for bad in (rank, "text"):
        try:
            ops.gather_object(comm, bad)
        except TypeError as error:
            assert "rank 0 passed" in str(error)
        else:
            raise AssertionError(bad)
    try:
        ops.gather(comm, ["text"])
    except TypeError as error:
        assert "found str" in str(error)
    else:
        raise AssertionError("gather took text")
    big = torch.arange(40_000).reshape(200, 200) + rank
    gathered = ops.gather(comm, [big, big.t()])
    assert torch.equal(gathered[1][200:], big.t() - rank + 1)
    return "done"


def ranks_others() -> str:
    comm = connect()
    rank = comm.rank
    tree: dict[str, Any] = {
        "a": torch.full((3, 2), float(rank)),
        "b": [torch.tensor(rank), torch.tensor([True, bool(rank)])],
    }
    with Counting(comm) as counting:
        sent = ops.broadcast(comm, tree, from_process=1)
    assert counting.count == 1
    assert sent["a"] is tree["a"] and tree["a"].eq(1).all()
    assert tree["b"][0].item() == 1 and tree["b"][1].all()
    column, row = stride(torch.full((3,), float(rank))), torch.full((1,), 1j + rank)
    column_sent, row_sent = ops.broadcast(comm, [column, row.expand(3)], from_process=1)
    assert column_sent is column and column.tolist() == [1, 1, 1]
    assert row_sent.tolist() == [1 + 1j] * 3 and row.tolist() == [1j + rank], (
        "an expanded tensor cannot be written"
    )
    mine = [rank, {"r": rank}]
    assert ops.broadcast_object_list(comm, mine, from_process=1) is mine and mine == [1, {"r": 1}]
    values: dict[str, Any] = {
        "f": torch.tensor([1.0 + rank]),
        "g": (torch.tensor(2.0), torch.tensor([3 + rank])),
    }
    with Counting(comm) as counting:
        assert nested.listify(ops.reduce(comm, values, "sum")) == {"f": [3.0], "g": (4.0, [7])}
    assert counting.count == 2, "one collective per dtype"
    assert nested.listify(ops.reduce(comm, values, "mean", scale=2)) == {"f": [3.0], "g": (4.0, [7.0])}
    assert nested.listify(ops.reduce(comm, values, "max")) == {"f": [2.0], "g": (2.0, [4])}
    assert nested.listify(ops.reduce(comm, values, "none"))["f"] == [1.0 + rank]
    assert values["f"].item() == 1.0 + rank, "the input is left alone"
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2):
        value = torch.full((2,), 1 + 2 * rank).to(dtype)
        for reduction, wanted in (("sum", 4.0), ("mean", 2.0), ("max", 3.0), ("none", 1.0 + 2 * rank)):
            result = ops.reduce(comm, [value, torch.ones(1)], reduction)[0]
            is_averaged = reduction == "mean" and not dtype.is_floating_point
            assert (
                result.dtype == (torch.float32 if is_averaged else dtype)
                and result.float().tolist() == [wanted] * 2
            )
    if hasattr(torch, "float8_e8m0fnu"):  # powers of two
        power = ops.reduce(comm, torch.ones(2).to(torch.float8_e8m0fnu), "sum")
        assert power.dtype == torch.float8_e8m0fnu and power.float().tolist() == [2, 2]
    conjugated = torch.full((2,), 1j + rank).conj()
    assert comm.broadcast(conjugated, 1) is conjugated and conjugated.tolist() == [1 - 1j] * 2
    refused: list[tuple[Callable[..., Any], torch.Tensor, str]] = [
        (operation, torch.eye(2).to_sparse(), "layout torch.sparse_coo: pass tensor.to_dense()")
        for operation in (ops.gather, ops.broadcast, ops.reduce, ops.pad_across_processes)
    ]
    refused.append(
        (functools.partial(ops.reduce, reduction="sum"), torch.ones(1).to(torch.uint64), "to int64")
    )
    for operation, tensor, reason in refused:
        try:
            operation(comm, [tensor, torch.ones(2)])
        except TypeError as error:
            assert reason in str(error)
        else:
            raise AssertionError(reason)
    ragged = [torch.ones(2 + rank, 3, dtype=torch.bool), torch.ones(2, 1 + rank), torch.tensor(5)]
    with Counting(comm) as counting:
        padded = ops.pad_across_processes(comm, ragged, dim=1, pad_index=-1, pad_first=True)
    assert counting.count == 1
    assert padded[0] is ragged[0] and padded[2] is ragged[2]
    assert padded[1].tolist() == [[1, 1] if rank else [-1, 1]] * 2
    assert ops.pad_across_processes(comm, ragged, dim=0)[0].dtype == torch.bool
    assert ops.pad_across_processes(comm, torch.ones(1 + rank), dim=-1).shape == (2,)
    return "done"


def ranks_like_accelerate() -> str:
    comm = connect()
    warnings.simplefilter("ignore")
    reference = importlib.import_module("accelerate.utils")
    assert importlib.import_module("accelerate").PartialState(cpu=True).num_processes == WORLD
    rank = comm.rank
    tree = {
        "x": torch.arange(6).reshape(3, 2) + rank,
        "y": (torch.tensor(rank), [torch.ones(2, dtype=torch.bool)]),
    }
    floats = [torch.full((2,), 1.0 + rank), torch.tensor(float(rank))]
    ragged = [torch.ones(2 + rank, 3), torch.ones(1, 1 + rank)]
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gather": (lambda: ops.gather(comm, tree), lambda: reference.gather(tree)),
        "sum": (lambda: ops.reduce(comm, floats, "sum"), lambda: reference.reduce(floats, "sum")),
        "mean": (lambda: ops.reduce(comm, floats), lambda: reference.reduce(floats)),
        "pad": (
            lambda: ops.pad_across_processes(comm, ragged, 1, 7, True),
            lambda: reference.pad_across_processes(ragged, 1, 7, True),
        ),
        "object": (lambda: ops.gather_object(comm, [rank]), lambda: reference.gather_object([rank])),
    }
    for name, (ours, theirs) in cases.items():
        assert str(ours()) == str(theirs()), name
    return "done"


def ranks_fill_dicts_in_other_orders() -> str:
    comm = connect()
    values = {"a": torch.tensor([comm.rank]), "b": torch.tensor([10, 11]) + comm.rank}
    tree = dict(sorted(values.items(), reverse=comm.rank == 1))
    for _ in range(3):
        gathered = ops.gather(comm, [tree])[0]
        assert {key: value.tolist() for key, value in gathered.items()} == {
            "a": [0, 1],
            "b": [10, 11, 11, 12],
        }
        assert list(gathered) == list(tree), "its own order stays"
    assert ops.reduce(comm, tree, "sum")["a"].tolist() == [1]
    assert ops.pad_across_processes(comm, tree)["b"].tolist() == values["b"].tolist()
    sent = ops.broadcast(comm, tree, 1)
    assert {key: value.tolist() for key, value in sent.items()} == {"a": [1], "b": [11, 12]}
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for operation in (ops.gather, ops.broadcast, ops.reduce, ops.pad_across_processes):
        with pytest.raises(TypeError, match="a quantized one"):
            operation(comm, [quantized])
    return "done"


@pytest.mark.parametrize(
    "body", [ranks_gather, ranks_gather_details, ranks_others, ranks_fill_dicts_in_other_orders]
)
def test_two_processes(body: Any) -> None:
    assert run_ranks(body) == ["done", "done"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_cannot_be_padded_is_told_in_one_process_too() -> None:
    ragged = torch.nested.nested_tensor([[1, 2, 3], [1]])
    for tensor in (ragged, [ragged]):
        with pytest.warns(ops.CannotPadNestedTensorWarning, match="stays as it is"):
            padded = ops.pad_across_processes(SingleComm(), tensor)
        assert padded is tensor or padded[0] is ragged


def test_same_results_as_accelerate() -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(ranks_like_accelerate) == ["done", "done"]


# --- debug: disagreement is an error on every rank, never a hang ------------------------------------------------

DISAGREEMENTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "shape": (
        lambda rank: {"labels": [torch.zeros(4 - rank, 2)]},
        "batch['labels'][0]: rank 0 has [4, 2] float32, rank 1 has [3, 2] float32",
    ),
    "dtype": (
        lambda rank: torch.zeros(2, dtype=torch.int64 if rank else torch.float32),
        "batch: rank 0 has [2] float32, rank 1 has [2] int64",
    ),
    "structure": (
        lambda rank: {"a": torch.zeros(1)} if rank else {"a": torch.zeros(1), "b": torch.zeros(1)},
        "batch['b']: rank 0 has [1] float32, rank 1 has nothing",
    ),
    "no tensor": (
        lambda rank: [torch.zeros(1)] if rank else ["text"],
        "batch[0]: rank 0 has a str, rank 1 has [1] float32",
    ),
    "order": (
        lambda rank: dict([("a", torch.zeros(1)), (None, torch.zeros(1))][:: 1 - 2 * rank]),
        "in a different order",
    ),
}


def ranks_disagree() -> dict[str, str]:
    comm = connect()
    assert comm.debug
    said = {}
    operations: tuple[Callable[..., Any], ...] = (ops.gather, ops.reduce, ops.broadcast)
    for operation in operations:
        for name, (make, _) in DISAGREEMENTS.items():
            try:
                operation(comm, make(comm.rank))
            except CollectiveError as error:
                said[f"{operation.__name__} {name}"] = str(error)
    try:
        (ops.gather if comm.rank else ops.broadcast)(comm, torch.zeros(1))
    except CollectiveError as error:
        said["operations"] = str(error)
    try:
        ops.pad_across_processes(comm, torch.zeros(2, 2 + comm.rank))
    except CollectiveError as error:
        said["pad"] = str(error)
    ops.pad_across_processes(comm, torch.zeros(2 + comm.rank, 2))
    ops.gather(comm, [torch.zeros(2)])
    return said


def test_debug_names_ranks_and_paths_on_every_rank() -> None:
    first, second = run_ranks(ranks_disagree, environment={"ACCELERATE_DEBUG_MODE": "1"})
    assert first == second
    for operation in ("gather", "reduce", "broadcast"):
        for name, (_, message) in DISAGREEMENTS.items():
            assert message in first[f"{operation} {name}"]
            assert operation in first[f"{operation} {name}"]
    assert "rank 0 calls broadcast, rank 1 calls gather" in first["operations"]
    assert "batch: rank 0 has [*, 2] float32, rank 1 has [*, 3] float32" in first["pad"]


def test_many_ranks_are_named_in_spans() -> None:
    class Seen(SingleComm):
        world_size = 5

        def all_gather_object(self, obj: Any) -> list[Any]:
            other = (obj[0], [(path, "[9] int8") for path, _ in obj[1]])
            return [obj, obj, obj, other, obj]

    with pytest.raises(CollectiveError, match=r"ranks 0-2, 4 have \[1\] float32, rank 3 has \[9\] int8"):
        ops.gather(Seen(debug=True), torch.zeros(1))


# --- one process -------------------------------------------------------------------------------------------------


def test_a_single_process_returns_its_inputs() -> None:
    comm = SingleComm()
    tree = {"a": torch.ones(2), "b": "text"}
    assert ops.gather(comm, tree) is tree
    assert ops.broadcast(comm, tree) is tree
    assert ops.gather_object(comm, 5) == 5
    assert ops.broadcast_object_list(comm, [1]) == [1]
    value = torch.ones(2)
    reduced = ops.reduce(comm, value, "sum")
    assert torch.equal(reduced, value) and reduced is not value
    assert ops.pad_across_processes(comm, value) is value


def test_wrong_arguments() -> None:
    comm = SingleComm()
    with pytest.raises(ValueError, match="choose among sum, mean, max, none"):
        ops.reduce(comm, torch.ones(1), "median")
    with pytest.raises(ValueError, match="from_process 1"):
        ops.broadcast(comm, torch.ones(1), from_process=1)


class Echo(SingleComm):
    """A world of three whose ranks all send what this one sends: for packing, without processes."""

    world_size = 3

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * 3)


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_packing_round_trip(seed: int) -> None:
    comm = Echo()
    tree = make_tree(seed, 0)
    for _ in range(3):
        gathered = nested.leaves_of(ops.gather(comm, tree), by_key=True)
        for ours, wanted in zip(gathered, expected_gather([tree] * 3), strict=True):
            assert ours.dtype == wanted.dtype and torch.equal(ours, wanted)


def test_backend_and_barrier() -> None:
    assert run_ranks(ranks_barrier) == [("gloo", 2), ("gloo", 2)]


def ranks_barrier() -> tuple[str, int]:
    comm = connect()
    comm.barrier()
    names = str(dist.get_backend()), comm.world_size
    comm.close()
    assert not dist.is_initialized()
    return names


def test_collectives_of_all_backends_of_a_group_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on a GPU has NCCL and gloo in one group, whose own number is that of NCCL alone."""

    class Backend(dist.ProcessGroup):
        def __init__(self, number: int) -> None:
            super().__init__(0, 1)
            self.number = number

        def _get_sequence_number_for_group(self) -> int:
            return self.number

    class Mute(Backend):
        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError("it does not count")

    class Group(Backend):
        _device_types = [torch.device("cpu"), torch.device("cuda"), torch.device("xpu"), torch.device("mps")]  # noqa: RUF012
        group_name = "0"
        backends = {"cpu": Backend(3), "cuda": Backend(4), "mps": Mute(5)}  # noqa: RUF012

        def _get_backend(self, device: torch.device) -> Any:
            return self.backends["cuda" if device.type == "xpu" else device.type]

    monkeypatch.setattr(torch_dist, "group_exists", lambda: True)
    world = type(dist.distributed_c10d._world)
    monkeypatch.setattr(world, "pg_map", {Group(4): ("cpu:gloo,cuda:nccl", None)})
    assert torch_dist.count_collectives() == {"0": 7}


def rank_registers() -> list[float]:

    with mock.patch.object(atexit, "register", wraps=atexit.register) as register:
        Accelerator(cpu=True)
    return [call.args[1] for call in register.call_args_list if call.args[0] is time.sleep]


@pytest.mark.parametrize("launched", [False, True])
def test_the_end_of_python_leaves_gloo_the_time_for_its_last_tensors(launched: bool) -> None:
    """Its thread aborts the process if it asks for Python's lock later; launched workers end in another way."""
    environment = {"FORK_LAUNCHED": "1"} if launched else {}
    for found in run_ranks(rank_registers, environment=environment):
        assert bool(found) != launched and all(seconds > 0 for seconds in found)


def rank_0_leaves_first(folder: str, how: str) -> bool:
    accelerator = Accelerator(cpu=True)
    leave = accelerator.end_training if how == "end" else PartialState().destroy_process_group
    there = Path(folder) / "there"
    if accelerator.process_index == 1:
        time.sleep(0.3)
        there.touch()
    with mock.patch.object(torch_dist, "_LEAVING_S", PATIENCE_S):
        leave()
    return there.exists()


@pytest.mark.parametrize("how", ["end", "destroy"])
def test_ranks_leave_a_group_together(how: str, tmp_path: Path) -> None:
    """Else the others' connections are reset while they are in their last collective, or opening the group."""
    assert run_ranks(rank_0_leaves_first, str(tmp_path), how) == [True, True]
