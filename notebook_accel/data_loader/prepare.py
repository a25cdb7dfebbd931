"""prepare_data_loader: make of any data loader the one of this process."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from .. import runtime as process
from ..caller import warn
from ..combinations import refuse
from ..devices import find_default
from ..runtime import Runtime
from .base import PreparedLoader, outer_sampler
from .dispatch import DataLoaderDispatcher
from .indices import draw_seed
from .iterable import IterableDatasetShard
from .own import has_own_iteration
from .samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    check_split,
    options_of,
    sampler_chain,
    share_of,
)
from .shard import DataLoaderShard

_NUMBERS: Final = ("num_replicas", "world_size")
_MEANT: Final = (
    "already_sharded=True says that each process reads its own share, already_sharded=False that it is not so"
)


@dataclass(frozen=True, slots=True)
class _Place:
    """Which share of how many, and how samples are shared out."""

    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """What a loader reads.

    Attributes:
        dataset: the dataset, or the share of an iterable one.
        choice: the arguments of `DataLoader` that choose samples and batches.
        generator: the one that decides the order, which all ranks must have alike.
        shards: how many processes the dataset or its sampler is shared out to already.
    """

    dataset: Any
    choice: dict[str, Any]
    generator: torch.Generator | None = None
    shards: int = 1


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    runtime: Runtime | None = None,
    already_sharded: bool | None = None,
) -> DataLoader[Any]:
    """Return a data loader that gives this process its share of the batches of `dataloader`.

    Args:
        dataloader: as torch makes it; its dataset, samplers and options are kept, and so are attributes, methods and
            `__iter__` of a subclass.
        device: where batches go if `put_on_device`.
        num_processes: how many shares; by default the processes of the run.
        process_index: which share; by default the rank.
        split_batches: True splits each batch over the processes, False gives them whole batches in turn.
        rng_types: generators (`torch`, `cuda`, `xla`, `generator`) that every epoch starts with as rank 0 has
            them; `generator` is that of the sampler or of the iterable dataset.
        dispatch_batches: True reads on rank 0 only; None does so for iterable datasets if `put_on_device`,
            except on XLA devices.
        even_batches: True repeats samples from the start so that all processes get equal batches.
        slice_fn_for_dispatch: takes the part of a process out of a dispatched batch.
        use_seedable_sampler: True replaces a `RandomSampler`, though none of a subclass, by a `SeedableRandomSampler`.
        data_seed: its seed; by default that of rank 0's global generator.
        non_blocking: True copies from pinned memory while the computation goes on.
        use_stateful_dataloader: True returns a loader of torchdata, with `state_dict` and `load_state_dict`.
        torch_device_mesh: ranks that differ only in its `tp` and `cp` dimensions get the same batches.
        already_sharded: True if each process has made the loader of its own share, whose batches stay as they are;
            False if all have made the same one. None finds it out where a sampler has a `rank`, as `DistributedSampler`
            has, and warns of datasets that look like a share.

    Raises:
        ValueError: `split_batches` with a batch size that is unknown or no multiple of the number of processes,
            `dispatch_batches` without `put_on_device` or of a loader that is shared out already, or a sampler for
            other processes.
        TypeError: `dataloader` is no loader, or iterates in its own way with `use_stateful_dataloader`.
        ImportError: `use_stateful_dataloader` without torchdata.
    """
    if isinstance(dataloader, type) or not hasattr(dataloader, "batch_sampler"):
        raise TypeError(f"prepare_data_loader takes a DataLoader, not {dataloader!r:.80}")
    if use_stateful_dataloader and type(dataloader) is not DataLoader and has_own_iteration(dataloader):
        raise refuse("stateful, own iteration", type(dataloader).__name__)
    runtime = runtime if runtime is not None else process.current()
    num_processes, process_index = share_of(
        _default_to_runtime(num_processes, runtime, "world_size", 1),
        _default_to_runtime(process_index, runtime, "rank", 0),
        torch_device_mesh,
    )
    outer = outer_sampler(dataloader)
    if already_sharded is None:
        already_sharded = _is_share(dataloader.dataset, outer, num_processes, process_index)
    goes_to = device if put_on_device else None
    dispatch_batches = _choose_dispatch(dataloader, dispatch_batches, put_on_device, goes_to, already_sharded)
    place = _Place(num_processes, process_index, split_batches, even_batches)
    if split_batches and not already_sharded and not (dispatch_batches and _batch_size(dataloader) == 1):
        check_split(_batch_size(dataloader), num_processes)
    if use_seedable_sampler:
        outer = _seedable(outer, data_seed, place, runtime)
    source = _source(
        dataloader,
        outer,
        None if dispatch_batches or already_sharded or num_processes == 1 else place,
        gives_generator=not use_seedable_sampler,
    )
    shared: dict[str, Any] = {
        "_drop_last": bool(dataloader.drop_last or getattr(outer, "drop_last", False)),
        "_non_blocking": non_blocking,
        "torch_device_mesh": torch_device_mesh,
        "use_stateful_dataloader": use_stateful_dataloader,
        "runtime": runtime,
    }
    options = options_of(dataloader) | source.choice | shared
    if use_stateful_dataloader and hasattr(dataloader, "snapshot_every_n_steps"):
        options["snapshot_every_n_steps"] = dataloader.snapshot_every_n_steps
    if dispatch_batches:
        del options["generator"]
        dispatcher = DataLoaderDispatcher(
            source.dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **options
        )
        return _keep_own(dispatcher, dataloader)
    if rng_types is not None and source.generator is None:
        rng_types = [kind for kind in rng_types if kind != "generator"]
    shard = DataLoaderShard(
        source.dataset,
        device=goes_to,
        rng_types=rng_types,
        synchronized_generator=source.generator,
        **options,
    )
    shard.shards = num_processes if already_sharded else source.shards
    if runtime is not None and not already_sharded:
        shard.is_led = torch_device_mesh is not None or 1 < num_processes == runtime.topology.world_size
    return _keep_own(shard, dataloader)


def _keep_own(prepared: PreparedLoader, dataloader: DataLoader[Any]) -> PreparedLoader:
    """Return the prepared loader, with what the user's has beside what torch's loaders have."""
    if type(dataloader) is not DataLoader:
        prepared.adopt(dataloader)
    return prepared


def _choose_dispatch(
    dataloader: DataLoader[Any], asked: bool | None, placed: bool, device: torch.device | None, sharded: bool
) -> bool:
    """Return whether rank 0 reads for all."""
    if asked is None:
        # not on XLA devices, which exchange objects as tensors of the device
        on_xla = device is not None and device.type == "xla"
        asked = placed and not sharded and not on_xla and isinstance(dataloader.dataset, IterableDataset)
    if asked and not placed:
        raise refuse("dispatch, not placed")
    if asked and sharded:
        raise refuse("dispatch, sharded")
    return asked


def _is_share(dataset: Any, outer: Any, num_processes: int, process_index: int) -> bool:
    """Return True where a sampler, or a dataset of the datasets library, knows the share of this process.

    Of datasets that look like a share it warns.

    Args:
        dataset: of the loader.
        outer: its batch sampler, or sampler.
        num_processes: how many shares there are in this run.
        process_index: which one is this process's.

    Raises:
        ValueError: the sampler knows the share of another process, or one of other processes.
    """
    split_by_node = getattr(dataset, "_distributed", None)
    torchs = (BatchSampler, RandomSampler, SequentialSampler)
    is_torchs = type(outer) in torchs and type(getattr(outer, "sampler", outer)) in torchs
    for part in (*(() if is_torchs else sampler_chain(outer)), split_by_node):
        number, rank = _find_place(part)
        if number in (None, 1) or rank is None:
            continue
        if (number, rank) == (num_processes, process_index):
            return True
        owner = dataset if part is split_by_node else part
        problem = (
            f"{type(owner).__name__} gives rank {rank} of {number} processes its share, and this is process "
            f"{process_index} of {num_processes}: make it with {num_processes} and {process_index}, or leave it to "
            f"prepare to share the samples out; {_MEANT}"
        )
        if num_processes > 1:
            raise ValueError(problem)
        warn(problem)  # nothing is shared out: the loader reads what it would without prepare
        return False
    if num_processes > 1 and (sign := _find_sign(dataset, num_processes, process_index)):
        warn(
            f"{sign}: if this is the share of a rank, only 1 of {num_processes} samples is read, because prepare "
            f"shares it out once more. {_MEANT}"
        )
    return False


def _find_place(part: Any) -> tuple[int | None, int | None]:
    """Return how many processes a sampler or dataset is for and whose share it gives; None where it does not say."""
    values = [getattr(part, name, None) for name in _NUMBERS]
    number = next((value for value in values if isinstance(value, int)), None)
    rank = getattr(part, "rank", None)
    return number, rank if isinstance(rank, int) else None


def _find_sign(dataset: Any, num_processes: int, process_index: int) -> str:
    """Return why a dataset may be the share of one process, as a clause; empty if nothing tells."""
    number, rank = _find_place(dataset)
    if rank is not None or (number is not None and isinstance(dataset, IterableDataset)):
        return (
            f"the dataset {type(dataset).__name__} has a {'rank' if rank is not None else 'number of ranks'}"
        )
    if isinstance(dataset, Subset) and hasattr(dataset.dataset, "__len__"):
        taken, total = dataset.indices, len(dataset.dataset)
        in_turn = range(process_index, total, num_processes)
        first = range(total // num_processes), range(-(-total // num_processes))
        alike = [in_turn, *(first if process_index == 0 else ())]
        if any(len(taken) == len(each) > 1 and all(map(operator.eq, taken, each)) for each in alike):
            return f"the Subset has the {len(taken)} of {total} samples that rank {process_index} would get"
    return ""


def _default_to_runtime(number: int | None, runtime: Runtime | None, name: str, alone: int) -> int:
    if number is not None:
        return number
    return alone if runtime is None else int(getattr(runtime.topology, name))


def _batch_size(dataloader: DataLoader[Any]) -> int | None:
    if dataloader.batch_size is not None:
        return dataloader.batch_size
    size: int | None = getattr(outer_sampler(dataloader), "batch_size", None)
    return size


def _source(
    dataloader: DataLoader[Any], outer: Any, place: _Place | None, *, gives_generator: bool
) -> _Source:
    """Return what the prepared loader reads: all of it where `place` is None."""
    if isinstance(dataloader.dataset, IterableDataset):
        return _iterable_source(dataloader, place)
    generator = None
    if place is not None:
        generator = _order_of(getattr(outer, "sampler", outer), gives_generator=gives_generator)
        outer = BatchSamplerShard(
            outer,
            num_processes=place.num_processes,
            process_index=place.process_index,
            split_batches=place.split_batches,
            even_batches=place.even_batches,
        )
    batched = dataloader.batch_sampler is not None
    choice = {"batch_sampler": outer} if batched else {"sampler": outer, "batch_size": None}
    return _Source(dataset=dataloader.dataset, choice=choice, generator=generator)


def _iterable_source(dataloader: DataLoader[Any], place: _Place | None) -> _Source:
    dataset: Any = dataloader.dataset
    size = dataloader.batch_size
    generator, shards = None, 1
    if place is not None and _shards_itself(dataset, place):
        shards = place.num_processes
        dataset = dataset.shard(num_shards=shards, index=place.process_index)
    elif place is not None:
        generator = getattr(dataset, "generator", None)
        dataset = IterableDatasetShard(
            dataset,
            batch_size=size,
            drop_last=dataloader.drop_last,
            num_processes=place.num_processes,
            process_index=place.process_index,
            split_batches=place.split_batches,
        )
        if place.split_batches and size is not None:
            size //= place.num_processes
    choice = {"batch_size": size, "drop_last": dataloader.drop_last}
    return _Source(dataset=dataset, choice=choice, generator=generator, shards=shards)


def _shards_itself(dataset: Any, place: _Place) -> bool:
    """Return True for an iterable dataset of the datasets library that has files enough for all processes."""
    library = any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)
    return library and not place.split_batches and bool(dataset.n_shards >= place.num_processes)


def _order_of(sampler: Any, *, gives_generator: bool) -> torch.Generator | None:
    """Return the generator that the sampler draws its order from, None for the global one.

    Args:
        sampler: of single indices.
        gives_generator: a sampler that could have a generator and has none gets one.
    """
    if isinstance(sampler, SeedableRandomSampler) or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None and gives_generator:
        sampler.generator = torch.Generator(device=find_default())
        sampler.generator.manual_seed(draw_seed())
    generator: torch.Generator | None = sampler.generator
    return generator


def _seedable(outer: Any, data_seed: int | None, place: _Place, runtime: Runtime | None) -> Any:
    """Return the batch sampler, or sampler, with its `RandomSampler` replaced by one that the epoch seeds."""
    sampler = getattr(outer, "sampler", outer)
    if type(sampler) is not RandomSampler:  # a subclass may have an order of its own
        return outer
    if data_seed is None:
        data_seed = torch.random.initial_seed()
        if runtime is not None and place.num_processes > 1:
            data_seed = int(runtime.comm.broadcast_object(data_seed, 0))
    seedable = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
    if outer is sampler:
        return seedable
    if type(outer) is BatchSampler:
        return BatchSampler(seedable, outer.batch_size, outer.drop_last)
    outer = copy.copy(outer)
    outer.sampler = seedable
    return outer
