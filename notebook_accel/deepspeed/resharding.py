"""Shares out the state of ZeRO 1, 2 and 3 over another number of processes than saved it, or in another order.

DeepSpeed can load the shards of the same number only. For others it has the universal checkpoint (0.19,
`ds_to_universal` and `load_universal`), which is not used here: it leaves buffers and frozen weights as they are,
converts the state of Adam alone, and under ZeRO 3 gives the options of the first group of parameters to all groups.
Here each process makes the shard that it would have saved itself, in memory, and DeepSpeed loads that one as any other.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..checkpointing import pickled
from ..errors import CheckpointError

_OPTIMIZER_FILES: Final = "_optim_states.pt"
_OPTIMIZER: Final = "optimizer_state_dict"
_WEIGHTS: Final = "fp32"
"""Stands for the weights among the keys of an optimizer's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Where a rank holds some elements of a parameter.

    Attributes:
        rank: of the process.
        flat: index of the flat tensor.
        start: in the flat tensor.
        offset: in the flattened parameter.
        length: how many elements.
    """

    rank: int
    flat: int
    start: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Where the elements after these begin in the flattened parameter."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the trained parameters lie in the flat tensors of one process or of several.

    Attributes:
        sizes: shapes of parameters by name, for each flat tensor.
        pieces: where the parameters are, by name; those of a parameter in order.
        groups: options of the optimizer; their `params` are indices of flat tensors.
    """

    sizes: Sequence[Mapping[str, Any]]
    pieces: Mapping[str, Sequence[Piece]]
    groups: Sequence[dict[str, Any]]

    def homes(self) -> dict[str, int]:
        """Return the optimizer's group of each parameter."""
        numbered = enumerate(self.groups)
        return {
            name: index for index, group in numbered for flat in group["params"] for name in self.sizes[flat]
        }

    def flats(self) -> dict[str, int]:
        """Return the index of the flat tensor of each parameter."""
        return {name: flat for flat, names in enumerate(self.sizes) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one process saved of the optimizer.

    Attributes:
        content: everything; the keys are DeepSpeed's.
        state: of the optimizer, for each flat tensor.
        weights: flat tensors in float32, perhaps without the padding that the state has.
        lengths: of the flat tensors with padding.
    """

    content: dict[str, Any]
    state: Mapping[int, dict[str, Any]]
    weights: Sequence[torch.Tensor]
    lengths: Sequence[int]

    def flat(self, key: str, index: int) -> torch.Tensor:
        """Return a flat tensor.

        Args:
            key: of the optimizer's state, or `fp32`.
            index: of the flat tensor.
        """
        return self.weights[index] if key == _WEIGHTS else self.state[index][key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshared:
    """What DeepSpeed would read from this process's files, had as many processes saved.

    Attributes:
        model: the content of the file with the model.
        optimizer: of that with the optimizer.
        path: a file that is there, for DeepSpeed to look for.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    path: Path

    @contextlib.contextmanager
    def replace_files(self, engine: Any) -> Iterator[None]:
        """Return a context in which an engine reads this in place of its files.

        Args:
            engine: of DeepSpeed.
        """

        def load(path: str, map_location: Any = None) -> dict[str, Any]:
            return self.optimizer if path.endswith(_OPTIMIZER_FILES) else self.model

        before = engine.checkpoint_engine
        engine.checkpoint_engine = types.SimpleNamespace(load=load)
        engine._get_all_ckpt_names = lambda *args: [str(self.path)]
        try:
            yield
        finally:
            engine.checkpoint_engine = before
            del engine._get_all_ckpt_names


def has_order(engine: Any, model: dict[str, Any]) -> bool:
    """Return True if the shards of a checkpoint hold the parameters in the order of this run, which options change.

    DeepSpeed (0.19) compares nothing, and would give parameters the state of others.

    Args:
        engine: of DeepSpeed, with ZeRO 1, 2 or 3.
        model: the content of the file with the model.
    """
    return list(map(list, model.get("param_shapes") or ())) == list(
        map(list, engine._get_zero_param_shapes())
    )


def reshare(where: Path, engine: Any, rank: int, world_size: int) -> Reshared:
    """Return this process's share of a checkpoint of another number of processes, or in another order.

    Args:
        where: folder with the files of the engine.
        engine: of DeepSpeed, with ZeRO 1, 2 or 3; nothing of it changes.
        rank: of this process.
        world_size: number of processes.

    Raises:
        CheckpointError: the files are damaged, do not fit, or cannot be shared out.
    """
    _check_kind(where, engine)
    is_stage3 = engine.zero_optimization_partition_weights()
    path = where / f"{'zero_pp_rank_0_' if is_stage3 else ''}mp_rank_00_model_states.pt"
    model = _read(path)
    try:
        saved_by = int(model["dp_world_size"])
        contents = [_read(_shard_path(where, number))[_OPTIMIZER] for number in range(saved_by)]
        shards = [_shard(content, is_stage3) for content in contents]
        saved = _make_saved_layout(model, shards, is_stage3)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{where} does not hold what DeepSpeed saves for ZeRO: {error!r}") from error
    own = _own_layout(engine, rank, world_size, saved.groups)
    _compare(where, saved, own)
    content = _share(where, shards, saved, own, engine)
    model = {**model, "dp_world_size": engine.seq_dp_world_size}
    if is_stage3 and model.get("frozen_param_fragments"):
        model["frozen_param_fragments"] = _frozen(where, model, saved_by, rank, world_size)
    return Reshared(model=model, optimizer={_OPTIMIZER: content}, path=path)


def _read(path: Path) -> dict[str, Any]:
    content = pickled.read(path, weights_only=False, mmap=True)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not what DeepSpeed saves")
    return content


def _shard_path(where: Path, rank: int) -> Path:
    found = sorted(where.glob(f"*zero_pp_rank_{rank}_mp_rank_00{_OPTIMIZER_FILES}"))
    if not found:
        raise CheckpointError(f"{where} has no shard of rank {rank}, zero_pp_rank_{rank}_*{_OPTIMIZER_FILES}")
    return found[0]


def _check_kind(where: Path, engine: Any) -> None:
    """Raise CheckpointError for an engine whose shards are others than those of plain ZeRO."""
    optimizer = engine.optimizer
    reason = None
    if engine.has_moe_layers:
        reason = "experts of a mixture belong to single processes"
    elif engine.zero_nvme_offload_optimizer():
        reason = "the optimizer's state is on NVMe"
    elif engine.zero_optimization_partition_weights():
        parameters = [item for group in optimizer.fp16_groups for item in group]
        world_size = engine.seq_dp_world_size
        if any(item.partition_numel() != _part(item.ds_numel, world_size) for item in parameters):
            reason = "weights are sharded inside groups of processes"
    elif not hasattr(optimizer, "bit16_groups"):
        reason = f"the optimizer is DeepSpeed's {type(optimizer).__name__}"
    if reason is not None:
        raise _make_refusal(where, reason)


def _make_refusal(where: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{where} can only be loaded by as many processes as saved it, with parameters in the same order, because "
        f"{reason}"
    )


def _part(length: int, world_size: int) -> int:
    """Return how many elements of a parameter each process has under ZeRO 3; the last ones may be padding."""
    return -(-length // world_size)


def _shard(content: dict[str, Any], is_stage3: bool) -> Shard:
    base = _base(content, is_stage3)
    weights = content["fp32_flat_groups" if is_stage3 else "single_partition_of_fp32_groups"]
    paddings = [0] * len(weights) if is_stage3 else content["group_paddings"]
    lengths = [item.numel() + padding for item, padding in zip(weights, paddings, strict=True)]
    return Shard(content=content, state=base["state"], weights=weights, lengths=lengths)


def _base(content: dict[str, Any], is_stage3: bool) -> dict[str, Any]:
    """Return the state of the user's optimizer in a shard."""
    base = content[_OPTIMIZER if is_stage3 else "base_optimizer_state"]
    if not isinstance(base, dict):
        raise TypeError("zero_optimization.elastic_checkpoint was on")
    return base


def _pieces(
    sizes: Sequence[Mapping[str, Any]], lengths: Sequence[int], rank: int, world_size: int, is_stage3: bool
) -> Iterator[tuple[str, Piece]]:
    """Yield name and place of the part that a process has of each parameter, which may be empty.

    ZeRO 1 and 2 put the parameters one after the other and cut the whole, ZeRO 3 cuts each parameter. DeepSpeed's own
    account, `param_slice_mappings`, is wrong with `round_robin_gradients` (0.19): it has the order of before.

    Args:
        sizes: shapes of parameters by name, for each flat tensor, in their order there.
        lengths: of the flat tensors of each process.
        rank: of the process.
        world_size: number of processes.
        is_stage3: whether this is ZeRO 3.
    """
    for flat, by_name in enumerate(sizes):
        place = 0 if is_stage3 else -rank * lengths[flat]
        for name, size in by_name.items():
            part = _part(size.numel(), world_size) if is_stage3 else size.numel()
            offset = rank * part if is_stage3 else max(0, -place)
            start = max(0, place)
            length = max(0, min(part if is_stage3 else lengths[flat] - start, size.numel() - offset))
            yield name, Piece(rank=rank, flat=flat, start=start, offset=offset, length=length)
            place += part


def _make_saved_layout(model: dict[str, Any], shards: Sequence[Shard], is_stage3: bool) -> Layout:
    sizes = model["param_shapes"]
    pieces: dict[str, list[Piece]] = {}
    for rank, shard in enumerate(shards):
        for name, piece in _pieces(sizes, shard.lengths, rank, len(shards), is_stage3):
            pieces.setdefault(name, []).append(piece)
    return Layout(sizes=sizes, pieces=pieces, groups=_base(shards[0].content, is_stage3)["param_groups"])


def _own_layout(engine: Any, rank: int, world_size: int, groups: Sequence[dict[str, Any]]) -> Layout:
    """Return where the parameters are in this process.

    Args:
        engine: of DeepSpeed.
        rank: of this process.
        world_size: number of processes.
        groups: with the options to load.
    """
    is_stage3, sizes = engine.zero_optimization_partition_weights(), engine._get_zero_param_shapes()
    pieces = _pieces(sizes, _lengths(engine), rank, world_size, is_stage3)
    optimizer, numbers = engine.optimizer, iter(range(len(sizes)))
    own_groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.optimizer.param_groups):
        flats = [next(numbers) for _ in group["params"]]
        if is_stage3:  # the optimizer has them only while it steps
            flats = [flat for flat, home in optimizer.sub_group_to_group_id.items() if home == index]
        own_groups.append({**group, "params": flats})
    if len(groups) == len(own_groups):  # else it is refused
        own_groups = [
            {**group, "params": own["params"]} for group, own in zip(groups, own_groups, strict=True)
        ]
    return Layout(sizes=sizes, pieces={name: [piece] for name, piece in pieces}, groups=own_groups)


def _lengths(engine: Any) -> list[int]:
    """Return the lengths of the flat tensors of this process."""
    optimizer = engine.optimizer
    if engine.zero_optimization_partition_weights():
        return [item.numel() for item in optimizer.fp32_partitioned_groups_flat]
    return [item.numel() for item in optimizer.single_partition_of_fp32_groups]


def _compare(where: Path, saved: Layout, own: Layout) -> None:
    """Raise CheckpointError where other parameters were trained, or in other groups, or a part of one is missing."""
    if len(saved.groups) != len(own.groups):
        raise CheckpointError(
            f"{where} has {len(saved.groups)} groups of parameters, and the optimizer has {len(own.groups)}"
        )
    stored, homes = saved.homes(), own.homes()
    for name in sorted(stored.keys() ^ homes.keys()):
        whose = "the optimizer does not train" if name in stored else "was not trained when it was saved"
        raise CheckpointError(f"{where}: {name!r} {whose}")
    for name, home in homes.items():
        if stored[name] != home:
            raise CheckpointError(
                f"{where} has {name!r} in group {stored[name]} of the optimizer, which has it in group {home}"
            )
    lengths = {name: size.numel() for by_name in saved.sizes for name, size in by_name.items()}
    for name, length in lengths.items():
        if sum(piece.length for piece in saved.pieces.get(name, ())) != length:
            raise CheckpointError(f"{where} does not have all {length} elements of {name!r}")


def _share(where: Path, shards: Sequence[Shard], saved: Layout, own: Layout, engine: Any) -> dict[str, Any]:
    """Return the content of the shard of this process."""
    optimizer, is_stage3 = engine.optimizer, engine.zero_optimization_partition_weights()
    flats = saved.flats()
    weights: list[torch.Tensor] = []
    state: dict[int, dict[str, Any]] = {}
    for index, length in enumerate(_lengths(engine)):
        source = sorted({flats[name] for name in own.sizes[index]})
        gather = functools.partial(_gather, shards, saved, own, index, length)
        weights.append(gather(_WEIGHTS))
        found = {
            key: gather(key) if _is_flat(shards, source, key) else _single(where, shards, source, key)
            for key in _keys(where, shards, source)
        }
        if found:
            state[index] = found
    base = {"state": state, "param_groups": own.groups}
    # all else, such as the loss scaler, is the same in all shards
    content = {**shards[0].content, "partition_count": optimizer.partition_count}
    if is_stage3:
        return {**content, _OPTIMIZER: base, "fp32_flat_groups": weights}
    return {
        **content,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": weights,
        "group_paddings": optimizer.groups_padding,
    }


def _keys(where: Path, shards: Sequence[Shard], source: Sequence[int]) -> list[str]:
    """Return the keys of an optimizer's state.

    Args:
        where: folder with the files of the engine.
        shards: all of them.
        source: indices of saved flat tensors, whose parameters come together in one.
    """
    states = [shard.state.get(flat, {}) for shard in shards for flat in source]
    keys = {key: None for state in states for key in state}
    for key in keys:
        if not all(key in state for state in states):
            raise CheckpointError(f"{where}: {key!r} is in the optimizer's state of some shards only")
    return list(keys)


def _is_flat(shards: Sequence[Shard], source: Sequence[int], key: str) -> bool:
    """Return whether the optimizer's state has a value for each element of the flat tensors."""
    return all(
        isinstance(value := shard.state[flat][key], torch.Tensor) and value.shape == (shard.lengths[flat],)
        for shard in shards
        for flat in source
    )


def _single(where: Path, shards: Sequence[Shard], source: Sequence[int], key: str) -> Any:
    """Return a value that all shards have alike, such as the number of steps."""
    values = [shard.state[flat][key] for shard in shards for flat in source]
    first = values[0]
    is_array = isinstance(first, torch.Tensor) and first.dim() > 0
    if is_array or not all(_is_same(first, value) for value in values):
        reason = f"{key!r} of the optimizer's state has neither one value for all elements nor one for each"
        raise _make_refusal(where, reason)
    return first.clone() if isinstance(first, torch.Tensor) else first


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _gather(
    shards: Sequence[Shard], saved: Layout, own: Layout, index: int, length: int, key: str
) -> torch.Tensor:
    """Return a flat tensor of this process; its padding is 0.

    Args:
        shards: all of them.
        saved: how the parameters lie in the shards.
        own: how they lie in this process.
        index: of the flat tensor.
        length: of the flat tensor.
        key: of the optimizer's state, or `fp32`.
    """
    made: torch.Tensor | None = None
    for name, (wanted,) in own.pieces.items():
        for piece in saved.pieces[name] if wanted.flat == index else ():
            first = max(wanted.offset, piece.offset)
            count = min(wanted.end, piece.end) - first
            if count <= 0:
                continue
            source = shards[piece.rank].flat(key, piece.flat)
            if made is None:
                made = torch.zeros(length, dtype=source.dtype)
            there = source.narrow(0, piece.start + first - piece.offset, count)
            made.narrow(0, wanted.start + first - wanted.offset, count).copy_(there)
    return torch.zeros(length) if made is None else made


def _frozen(
    where: Path, model: dict[str, Any], saved_by: int, rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """Return this process's parts of the weights that nothing trains; ZeRO 3 shards them too."""
    others = [
        _read(where / f"zero_pp_rank_{number}_mp_rank_00_model_states.pt") for number in range(1, saved_by)
    ]
    found = {}
    for name, size in model["frozen_param_shapes"].items():
        parts = [content["frozen_param_fragments"][name].flatten() for content in (model, *others)]
        whole = torch.cat(parts)[: size.numel()]
        part = _part(size.numel(), world_size)
        padded = torch.nn.functional.pad(whole, (0, part * world_size - size.numel()))
        found[name] = padded[part * rank : part * (rank + 1)].clone()
    return found
