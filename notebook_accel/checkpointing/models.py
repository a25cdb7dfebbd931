"""Loading weights into a model: checked by names and shapes first, then read straight into its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from ..comm import xla
from ..compilation import plain_name
from ..dtensors import is_sharded, shard_like, to_local
from ..errors import CheckpointError
from . import weights
from .pickled import Keep, Outline

Apply = Callable[[], None]
_PREFIX: Final = "module."
_SHOWN: Final = 5
EXTRA_STATE: Final = "_extra_state"
"""The last part of such a name; torch chose it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The weights in one file.

    Attributes:
        path: of the file.
        shapes: of its tensors by name, see `plain_name`.
        twins: for a name that was left out, the name with the same values.
        header: of a safetensors file.
        outline: of a file of torch.save.
        others: names of entries that are no tensors.
        verified: names whose values have been compared with their checksums.
        named: the names in the file of those that have others there.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    twins: dict[str, str]
    header: weights.Header | None = None
    outline: Outline | None = None
    others: tuple[str, ...] = ()
    verified: set[str] = field(default_factory=set)
    named: dict[str, str] = field(default_factory=dict)

    def read(self) -> dict[str, Any]:
        """Return all entries, on the CPU."""
        if self.header is not None:
            return dict(weights.read(self.path, self.header))
        assert self.outline is not None
        return dict(self.outline.fill(lambda path, tensor: None))

    def read_entry(self, name: str) -> Any:
        """Return one entry, on the CPU; it may be no tensor."""
        if self.header is not None:
            entry = self.header.entries[name]
            value = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            self.read_into({name: value})
            return value
        assert self.outline is not None
        return self.outline.fill(lambda path, tensor: None, only={name})[name]

    def read_together(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of each of these entries, in any order."""
        for name in names:
            yield name, self.read_entry(name)

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of these names into tensors of the same shapes, of any device and dtype."""
        if self.header is not None:
            self._read_safe(self.header, targets)
            return
        assert self.outline is not None

        def choose(path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor | Keep:
            target = targets[path[0]]
            return target if _fits(target, tensor.dtype) else functools.partial(copy_into, target)

        for name, value in self.outline.fill(choose, only=targets.keys()).items():
            if value is not targets[name]:
                copy_into(targets[name], value)

    def _read_safe(self, header: weights.Header, targets: Mapping[str, torch.Tensor]) -> None:
        direct: dict[str, torch.Tensor] = {}
        for name, target in targets.items():
            entry = header.entries[name]
            if _fits(target, entry.dtype):
                direct[name] = target
                continue
            value = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            weights.read_into(self.path, header, {name: value}, self.verified)
            copy_into(target, value)
        weights.read_into(self.path, header, direct, self.verified)

    def verify(self, names: Collection[str]) -> None:
        """Raise CheckpointError where values of these names are not those that were written; once for each name.

        `read_into` compares the others while it reads, when tensors have changed already.
        """
        if self.header is not None:
            new = [name for name in names if name not in self.verified]
            weights.verify(self.path, self.header, new)
            self.verified.update(new)

    def locate(self, name: str) -> tuple[Path, str] | None:
        """Return the safetensors file that has these values as they are, and their name there; None for other files."""
        return None if self.header is None else (self.path, self.named.get(name, name))


def plain_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's state dict with the names that it has where no part of it is compiled.

    Args:
        model: any.
    """
    return {plain_name(name): value for name, value in model.state_dict().items()}


def is_extra_state(name: str) -> bool:
    """Return True for a name of a state dict under which a module keeps what its `get_extra_state` returned.

    Args:
        name: the full name.
    """
    return name.rpartition(".")[2] == EXTRA_STATE


def copy_into(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy values into a tensor; one that is spread over processes gets this process's part.

    Args:
        target: gets the values.
        value: of its whole shape.
    """
    return target.copy_(shard_like(value, target))


def _fits(target: torch.Tensor, dtype: torch.dtype) -> bool:
    plain = (
        type(target) in (torch.Tensor, torch.nn.Parameter) and not target.is_conj() and not target.is_neg()
    )
    return plain and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()


def open_source(path: Path) -> Source:
    """Return what the file holds; CheckpointError names a file that is missing, cut off or foreign."""
    if path.suffix == ".safetensors":
        header = weights.read_header(path)
        named = {plain_name(name): name for name in header.entries}
        header = replace(
            header,
            entries={plain_name(name): entry for name, entry in header.entries.items()},
            texts={plain_name(name): plain_name(text) for name, text in header.texts.items()},
        )
        shapes = {name: entry.shape for name, entry in header.entries.items()}
        return Source(path=path, shapes=shapes, twins=header.texts, header=header, named=named)
    outline = Outline(path)
    if not isinstance(outline.content, dict):
        raise CheckpointError(f"{path} holds a {type(outline.content).__name__}, no weights by name")
    if any("_orig_mod" in str(name) for name in outline.content):
        outline.content = {plain_name(str(name)): value for name, value in outline.content.items()}
    tensors = {name: value for name, value in outline.content.items() if isinstance(value, torch.Tensor)}
    return Source(
        path=path,
        shapes={name: tuple(value.shape) for name, value in tensors.items()},
        twins={},
        outline=outline,
        others=tuple(name for name in outline.content if name not in tensors),
    )


def plan(
    model: torch.nn.Module,
    sources: Sequence[Source],
    *,
    strict: bool = True,
    unused: Collection[str] = (),
    **options: Any,
) -> Apply:
    """Check that the weights are whole and fit the model, and return what loads them.

    Wrappers' prefixes in front of all names do not matter, nor which parts of the model are compiled. A name that was
    left out when the weights were saved, because another had the same memory, gets that one's values.

    Args:
        model: the user's model, unwrapped.
        sources: files that hold its weights together.
        strict: refuse names that are missing or unknown.
        unused: names that the files may have and the model does not.
        options: more arguments of the model's `load_state_dict`.

    Raises:
        CheckpointError: names the file and the name that is damaged or does not fit.
    """
    if options or not _loads_plainly(model) or any(source.others for source in sources):
        for source in sources:
            source.verify(source.shapes)
        return _plan_by_model(model, sources, unused, strict=strict, **options)
    state = plain_state(model)
    renamed = strip_prefixes({name for source in sources for name in source.shapes}, state.keys())
    places = {renamed(name): source for source in sources for name in source.shapes}
    originals = {renamed(name): name for source in sources for name in source.shapes}
    twins = {renamed(name): renamed(kept) for source in sources for name, kept in source.twins.items()}
    wanted: dict[str, str] = {name: name if name in places else twins.get(name, "") for name in state}
    present = {_address(state[name]) for name, kept in wanted.items() if kept in places}
    missing = [
        name
        for name, kept in wanted.items()
        if kept not in places and (_address(state[name]) not in present or state[name].nbytes == 0)
    ]
    used = {kept for kept in wanted.values() if kept in places}
    where = ", ".join(str(source.path) for source in sources)
    if strict and missing:
        raise CheckpointError(f"{where} has no weights for {join_names(missing)}")
    if strict and (unknown := sorted(places.keys() - used - set(unused))):
        raise CheckpointError(f"{where} has weights that the model does not know: {join_names(unknown)}")
    for name, kept in wanted.items():
        if kept in places:
            shape = places[kept].shapes[originals[kept]]
            if shape != tuple(state[name].shape):
                raise CheckpointError(
                    f"{places[kept].path}: {name!r} has shape {list(shape)}, the model's {list(state[name].shape)}"
                )

    for source in sources:
        source.verify([name for name in source.shapes if renamed(name) in used])

    def apply() -> None:
        for source in sources:
            names = {name: kept for name, kept in wanted.items() if places.get(kept) is source}
            with torch.no_grad():
                source.read_into(
                    {originals[kept]: state[name] for name, kept in names.items() if name == kept}
                )
                for name, kept in names.items():
                    if name == kept:
                        continue
                    if kept not in state:
                        source.read_into({originals[kept]: state[name]})
                    elif _address(state[name]) != _address(state[kept]):
                        state[name].copy_(state[kept])

    return apply


def _plan_by_model(
    model: torch.nn.Module, sources: Sequence[Source], unused: Collection[str], **options: Any
) -> Apply:
    """Return what loads the weights by the model's own code, and restores the old ones where that fails."""

    def apply() -> None:
        content = {name: value for source in sources for name, value in source.read().items()}
        state = model.state_dict()
        own = {plain_name(name): name for name in state}
        renamed = strip_prefixes(set(content), own)
        content = {renamed(name): value for name, value in content.items() if renamed(name) not in unused}
        for source in sources:
            for name, kept in source.twins.items():
                if renamed(kept) in content:
                    content.setdefault(renamed(name), content[renamed(kept)])
        content = {own.get(name, name): value for name, value in content.items()}
        before = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()
        }
        for name, value in content.items():
            like: Any = state.get(name)
            if is_sharded(like) and isinstance(value, torch.Tensor) and value.shape == like.shape:
                content[name] = shard_like(value, like)
        try:
            model.load_state_dict(content, **options)
        except Exception as error:
            model.load_state_dict(before, **{key: value for key, value in options.items() if key == "assign"})
            where = ", ".join(str(source.path) for source in sources)
            raise CheckpointError(f"{where} does not fit the model: {error}") from error

    return apply


def _loads_plainly(model: torch.nn.Module) -> bool:
    """Return True if loading copies tensors by name and does nothing else."""
    for part in model.modules():
        kind = type(part)
        own = kind._load_from_state_dict is not torch.nn.Module._load_from_state_dict
        if own and not kind._load_from_state_dict.__module__.startswith("torch.nn.modules"):
            return False
        if kind.load_state_dict is not torch.nn.Module.load_state_dict:
            return False
        if kind.set_extra_state is not torch.nn.Module.set_extra_state:
            return False
        kinds = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")
        hooks = [hook for name in kinds for hook in (getattr(part, name, None) or {}).values()]
        if any(not _only_shards(hook) for hook in hooks):
            return False
    return all(
        tensor.device.type != "meta" and tensor.layout is torch.strided
        for tensor in model.state_dict().values()
    )


def _only_shards(hook: Any) -> bool:
    """Return True for a hook of fully_shard, which has the weights sharded while they are looked at."""
    module: str = getattr(getattr(hook, "hook", hook), "__module__", "")
    return module.startswith("torch.distributed.fsdp.")


def strip_prefixes(names: set[str], known: Any) -> Callable[[str], str]:
    """Return a function that removes wrappers' prefixes from a name, so that the model knows most of the names.

    Args:
        names: of stored weights.
        known: names in the model.
    """
    known = set(known)
    best, best_count = "", len(names & known)
    prefix, rest = "", names
    while rest and all(name.startswith(_PREFIX) for name in rest):
        prefix += _PREFIX
        rest = {name[len(_PREFIX) :] for name in rest}
        if len(rest & known) > best_count:
            best, best_count = prefix, len(rest & known)
    if best:
        return lambda name: name.removeprefix(best)
    # the names in the model have the prefix, and the stored names have none
    if len({_PREFIX + name for name in names} & known) > best_count:
        return lambda name: _PREFIX + name
    return lambda name: name


def _address(tensor: torch.Tensor) -> tuple[Any, ...]:
    if is_sharded(tensor):
        tensor = to_local(tensor)
    if tensor.device.type == "xla":
        return tensor.device, xla.tensor_id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def join_names(found: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(repr(name) for name in found[:_SHOWN])
    return shown if len(found) <= _SHOWN else f"{shown} and {len(found) - _SHOWN} more"
