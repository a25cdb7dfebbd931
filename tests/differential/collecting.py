"""Cases: gathering, reducing, padding and splitting."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    label: int


def collate(kind: str, rows: list[int]) -> Any:
    """Return a batch of numbers in one of several structures."""
    x = torch.tensor(rows, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(rows)
    made: dict[str, Any] = {
        "tensor": x,
        "padded": torch.cat([x, x.new_full((max(0, 3 - len(rows)), 1), -1)]),
        "tuple": (x, y),
        "list": [x, y],
        "dict": {"x": x, "y": [y, (x,)]},
        "namedtuple": Pair(x, Pair(y, x)),
    }
    return made[kind]


def gathered(
    library: Any,
    samples: int,
    kind: str = "tensor",
    batch_size: int = 3,
    drop_last: bool = False,
    **config: Any,
) -> Any:
    accelerator = library.Accelerator(
        cpu=True, dataloader_config=library.utils.DataLoaderConfiguration(**config)
    )
    loader = accelerator.prepare(
        DataLoader(
            list(range(samples)),  # type: ignore[arg-type]
            batch_size=batch_size,
            collate_fn=partial(collate, kind),
            drop_last=drop_last,
        )
    )
    seen = [accelerator.gather_for_metrics(batch) for batch in loader]
    return seen, [accelerator.gather(batch) for batch in loader]


def objects(library: Any, samples: int, forced: bool) -> Any:
    accelerator = library.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(samples)), batch_size=3))  # type: ignore[arg-type]
    seen = []
    for batch in loader:
        if forced:
            ragged = [torch.ones(int(number) + 1) for number in batch]
            seen.append(accelerator.gather_for_metrics(ragged, use_gather_object=True))
        else:
            seen.append(accelerator.gather_for_metrics([{"n": int(n), "text": str(n)} for n in batch]))
    return seen


def dataclasses_as_objects(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(7)), batch_size=2))  # type: ignore[arg-type]
    return [
        accelerator.gather_for_metrics([Sample(torch.ones(1) * n, int(n)) for n in batch]) for batch in loader
    ]


def outside_a_loader(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    rank = accelerator.process_index
    return (
        accelerator.gather_for_metrics(torch.tensor([rank, rank])),
        accelerator.gather(torch.tensor(float(rank))),
        accelerator.gather(
            {"a": [torch.ones(2, 1) * rank], "b": (torch.zeros(1, dtype=torch.int64) + rank,)}
        ),
        accelerator.gather(torch.tensor([True, rank == 0])),
    )


def reduced(library: Any, reduction: str, scale: float) -> Any:
    accelerator = library.Accelerator(cpu=True)
    rank = accelerator.process_index
    data = {"a": torch.tensor([1.0, 2.0]) * (rank + 1), "b": [torch.tensor(3.0 + rank)]}
    result = accelerator.reduce(data, reduction=reduction, scale=scale)
    return result, data, library.utils.reduce(torch.ones(2) * rank, reduction, scale)


def padded(library: Any, **arguments: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    rank = accelerator.process_index
    data = {"a": torch.ones(2 + rank, 3 - rank) * (rank + 1), "b": [torch.arange(4 - 2 * rank)]}
    if arguments.get("dim", 0) != 0:
        data = {"a": torch.ones(2, 3 - rank) * (rank + 1)}
    return accelerator.pad_across_processes(data, **arguments)


def functions(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    rank = accelerator.process_index
    words = [f"rank {rank}", {"n": rank}]
    return (
        library.utils.gather_object([rank, str(rank)]),
        library.utils.broadcast_object_list(list(words), from_process=0),
        library.utils.broadcast({"x": torch.ones(2) * rank}, from_process=0),
        library.utils.gather(torch.ones(1, 2) * rank),
        library.utils.pad_across_processes(torch.ones(1 + rank), pad_index=9),
    )


def triggered(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    before = accelerator.check_trigger()
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return before, accelerator.check_trigger(), accelerator.check_trigger()


def split(library: Any, inputs: Any, apply_padding: bool) -> Any:
    state = library.PartialState(cpu=True)
    # Accelerate writes the share into the caller's dict
    with state.split_between_processes(copy.deepcopy(inputs), apply_padding=apply_padding) as share:
        first = share
    accelerator = library.Accelerator(cpu=True)
    with accelerator.split_between_processes(copy.deepcopy(inputs), apply_padding) as share:
        return first, share


def turns(library: Any) -> Any:
    """Decorators say where a function runs."""
    accelerator = library.Accelerator(cpu=True)
    last = accelerator.num_processes - 1
    ran = []
    for name, decorate in {
        "main": accelerator.on_main_process,
        "local main": accelerator.on_local_main_process,
        "last": accelerator.on_last_process,
        "process": partial(accelerator.on_process, process_index=last),
        "local process": partial(accelerator.on_local_process, local_process_index=last),
    }.items():
        ran.append((name, decorate(lambda: "ran")()))
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        pass
    return ran, accelerator.is_last_process, accelerator.local_process_index


INPUTS: dict[str, Any] = {
    "list": [1, 2, 3, 4, 5],
    "even list": ["a", "b", "c", "d"],
    "tuple": (1, 2, 3),
    "one item": [7],
    "tensor": torch.arange(10.0).reshape(5, 2),
    "short tensor": torch.ones(1, 2),
    "dict": {"a": [1, 2, 3], "b": torch.arange(3), "c": ("x", "y", "z")},
    "nested list": [[1, 2], [3], [4, 5, 6]],
}


def differentiated(library: Any, reduction: str) -> Any:
    """Return the gradients of what was reduced, alone and in a tree."""
    accelerator = library.Accelerator(cpu=True)
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    loss = (weight * (1 + accelerator.process_index)).sum()
    tree = accelerator.reduce({"loss": loss, "also": [weight * 3], "plain": torch.ones(2)}, reduction)
    total = accelerator.reduce(loss, reduction)
    (total + tree["loss"] + tree["also"][0].sum()).backward()
    return [total, tree["plain"].requires_grad, total is loss, weight.grad, tree]


def reduced_alone(library: Any) -> Any:
    """Return means of what has no mean of its own dtype, which one process leaves as it is."""
    accelerator = library.Accelerator(cpu=True)
    if accelerator.num_processes > 1:
        return []
    return accelerator.reduce([torch.tensor([1, 2]), torch.tensor([True, False])], "mean")


CASES: dict[str, Callable[[Any], Any]] = {
    **{f"gather {n}": partial(gathered, samples=n) for n in (12, 13, 7, 4, 2)},
    **{
        f"gather {kind}": partial(gathered, samples=11, kind=kind)
        for kind in ("tuple", "list", "dict", "namedtuple", "padded")
    },
    "gather, drop_last": partial(gathered, samples=11, drop_last=True),
    "gather, split_batches": partial(gathered, samples=11, batch_size=4, split_batches=True),
    "gather, dispatch_batches": partial(gathered, samples=11, dispatch_batches=True),
    "objects": partial(objects, samples=11, forced=False),
    "objects, even": partial(objects, samples=12, forced=False),
    "objects, forced": partial(objects, samples=11, forced=True),
    "dataclasses": dataclasses_as_objects,
    "outside a loader": outside_a_loader,
    **{
        f"reduce {reduction} {scale}": partial(reduced, reduction=reduction, scale=scale)
        for reduction in ("sum", "mean")
        for scale in (1.0, 0.5)
    },
    **{
        f"reduce and differentiate {name}": partial(differentiated, reduction=name)
        for name in ("sum", "mean")
    },
    "reduce alone": reduced_alone,
    "pad": padded,
    "pad first": partial(padded, pad_first=True, pad_index=5),
    "pad dim 1": partial(padded, dim=1, pad_index=-1),
    "pad dim -1": partial(padded, dim=-1),
    "functions": functions,
    "trigger": triggered,
    "turns": turns,
    **{
        f"split {name}{', padded' if padding else ''}": partial(split, inputs=inputs, apply_padding=padding)
        for name, inputs in INPUTS.items()
        for padding in (False, True)
    },
}
