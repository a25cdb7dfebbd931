"""What a prepared loader gives a rank, written down alike for ours and for Accelerate's, and the cases to try."""

from __future__ import annotations

import importlib
import itertools
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    """A batch that is an object of the user's own."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True, slots=True)
class Deep:
    """A batch that cannot be written to, with all other kinds within it."""

    pair: Pair
    deeper: dict[str, list[Record]]


class Stream(IterableDataset[int]):
    """The numbers below n, without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class Pieces:
    """A batch sampler of the user's own, with batches of the given sizes."""

    def __init__(self, sizes: list[int], batch_size: int | None = None) -> None:
        stops = list(itertools.accumulate(sizes))
        self.batches = [list(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(batch) for batch in self.batches])

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loader and how it is prepared.

    Attributes:
        n: samples.
        data: `map`, `stream` (no length) or `sized` (a stream with a length).
        batches: sizes of the batches of a batch sampler of the user's own, `None` for torch's.
        known_size: the batch sampler has a `batch_size`.
        given: torch's batch sampler is handed to the loader, not made by it.
        own: it is handed over as the sampler of a loader with `batch_size=None`, whose dataset takes many indices.
        shape: what a batch is, a key of `COLLATE`.
        shuffle: `no`, `generator` (a seeded one) or `seedable`.
        config: for `DataLoaderConfiguration`.
        skip: batches that a second loader leaves out.
    """

    n: int
    batch_size: int = 2
    data: str = "map"
    batches: tuple[int, ...] | None = None
    known_size: bool = False
    given: bool = False
    own: bool = False
    shape: str = "tensor"
    shuffle: str = "no"
    drop_last: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    skip: int = 1

    @property
    def even(self) -> bool:
        """True if all ranks get as many batches, of one size."""
        return bool(self.config.get("even_batches", True)) and (self.batches is None or self.known_size)

    def loader(self) -> DataLoader[Any]:
        """Return torch's loader."""
        if self.data != "map":
            kind = Stream if self.data == "stream" else SizedStream
            stream = kind(self.n)
            return DataLoader(
                stream, self.batch_size, drop_last=self.drop_last, collate_fn=COLLATE[self.shape]
            )
        data: Any = list(range(self.n))
        options: dict[str, Any] = {"collate_fn": COLLATE[self.shape]}
        if self.batches is not None:
            size = self.batch_size if self.known_size else None
            return DataLoader(data, batch_sampler=Pieces(list(self.batches), size), **options)  # type: ignore[arg-type]
        sampler = BatchSampler(SequentialSampler(data), self.batch_size, self.drop_last)
        if self.given:
            return DataLoader(data, batch_sampler=sampler, **options)
        if self.own:
            return DataLoader(torch.arange(self.n), batch_size=None, sampler=sampler)  # type: ignore[arg-type]
        if self.shuffle == "no":
            return DataLoader(data, self.batch_size, drop_last=self.drop_last, **options)
        generator = torch.Generator().manual_seed(11) if self.shuffle == "generator" else None
        options |= {"shuffle": True, "drop_last": self.drop_last, "generator": generator}
        return DataLoader(data, self.batch_size, **options)


def _tensor(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples)


def _both(samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor(samples)
    return x, torch.stack([x, x * 10], dim=1)


COLLATE: dict[str, Any] = {
    "tensor": _tensor,
    "dict": lambda samples: dict(zip(("x", "y"), _both(samples), strict=True)),
    "tuple": _both,
    "namedtuple": lambda samples: Pair(*_both(samples)),
    "record": lambda samples: Record(*_both(samples)),
    "deep": lambda samples: Deep(Pair(*_both(samples)), {"records": [Record(*_both(samples))]}),
    "nested": lambda samples: {"deep": [_both(samples), {"z": _tensor(samples)}]},
}


def first_leaf(written: Any) -> list[int]:
    """Return the numbers of the first tensor of what `plain` wrote."""
    while not (isinstance(written, list) and all(isinstance(number, int) for number in written)):
        written = next(iter(written.values())) if isinstance(written, dict) else written[1][0]
    return written


def plain(batch: Any) -> Any:
    """Return the batch as numbers and names of types, to be compared across processes."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return (type(batch).__name__, [plain(part) for part in batch])
    if is_dataclass(batch):
        return (type(batch).__name__, [plain(getattr(batch, part.name)) for part in fields(batch)])
    return batch


def accelerators(library: str, case: Case) -> Any:
    """Return the library's accelerator for the case."""
    module = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    config = dict(case.config, use_seedable_sampler=case.shuffle == "seedable")
    if case.shuffle == "seedable":
        config["data_seed"] = 5
    return module.Accelerator(cpu=True, dataloader_config=utils.DataLoaderConfiguration(**config))


def length(loader: Any) -> Any:
    try:
        return len(loader)
    except TypeError:
        return "unknown"


def observe(library: str, case: Case) -> dict[str, Any]:
    """Return what a rank sees: two epochs, what metrics gather, the length, and what is left after skipping."""
    accelerator = accelerators(library, case)
    loader = accelerator.prepare_data_loader(case.loader())
    seen: dict[str, Any] = {"len": length(loader), "epochs": []}
    for _ in range(2):
        epoch = []
        for batch in loader:
            step = [plain(batch), loader.remainder if loader.end_of_dataloader else "more"]
            if case.even:
                step.append(plain(accelerator.gather_for_metrics(batch)))
            epoch.append(step)
        seen["epochs"].append(epoch)
    skipping = accelerator.skip_first_batches(accelerator.prepare_data_loader(case.loader()), case.skip)
    seen["skipped"] = [plain(batch) for batch in skipping]
    return seen


def cases(world: int) -> list[Case]:
    """Return the cases to try in a world of this size."""
    found = []
    size = max(2, world)  # a multiple of the world, so that batches can be split
    flags = (False, True)
    for n, drop, split, even in itertools.product((0, 1, 3, 7, 8, 9), flags, flags, flags):
        config = {"split_batches": split, "even_batches": even}
        found.append(Case(n=n, batch_size=size, drop_last=drop, config=config))
    for data, n, drop, split in itertools.product(("stream", "sized"), (0, 1, 3, 8, 9), flags, flags):
        for dispatch in flags:
            config = {"split_batches": split, "dispatch_batches": dispatch}
            found.append(Case(n=n, data=data, batch_size=size if split else 1, drop_last=drop, config=config))
    for n, split in itertools.product((0, 1, 3, 8, 9), flags):
        found.append(Case(n=n, batch_size=size, config={"split_batches": split, "dispatch_batches": True}))
    for shape, dispatch, split in itertools.product(COLLATE, flags, flags):
        config = {"dispatch_batches": dispatch, "split_batches": split}
        found.append(Case(n=7, batch_size=size, shape=shape, config=config))
    for shuffle, n, drop in itertools.product(("generator", "seedable"), (7, 8), flags):
        found.append(Case(n=n, shuffle=shuffle, drop_last=drop))
    for n, drop in itertools.product((0, 1, 3, 8, 9), flags):
        found += [Case(n=n, given=True, drop_last=drop), Case(n=n, own=True, drop_last=drop)]
    found.append(Case(n=9, batches=(2, 2, 2, 2, 1), known_size=True))
    found.append(Case(n=8, batches=(1, 3, 2, 2)))
    found.append(Case(n=8, batches=(1, 3, 2, 2), config={"even_batches": False}))
    found.append(Case(n=6, batches=(1, 3, 2), config={"even_batches": False}))
    return found
