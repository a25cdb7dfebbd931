"""Puts values of a checkpoint into the tensors of a model: reads all of them first, then replaces."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpointing import models
from ..checkpointing.folder import PathLike
from ..checkpointing.models import Source
from ..compilation import plain_name
from ..errors import CheckpointError
from ..hooks import tensors
from ..hooks.offloaded_tensor import like_parameter
from . import conversion, eight_bit, offload


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A name of a model's state dict: a parameter or a buffer of one of its modules.

    Attributes:
        name: the full name.
        owner: the module that has the tensor.
        key: the tensor's name in it.
        tensor: the tensor.
        is_buffer: True for a buffer.
    """

    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor
    is_buffer: bool


def list_slots(model: nn.Module, *, persistent: bool = True) -> Iterator[Slot]:
    """Yield all names of the state dict. A tensor with several names comes once for each.

    Args:
        model: with the tensors.
        persistent: False also yields buffers that are in no state dict.
    """
    for path, part in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, parameter in part._parameters.items():
            if parameter is not None:
                yield Slot(name=prefix + key, owner=part, key=key, tensor=parameter, is_buffer=False)
        for key, buffer in part._buffers.items():
            transient = persistent and key in part._non_persistent_buffers_set
            if buffer is not None and not transient:
                yield Slot(name=prefix + key, owner=part, key=key, tensor=buffer, is_buffer=True)


def list_extra_states(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the modules that keep more than tensors in a state dict, each with its names there.

    Args:
        model: with the modules.
    """
    found: dict[nn.Module, list[str]] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if type(part).set_extra_state is not nn.Module.set_extra_state:
            name = f"{path}.{models.EXTRA_STATE}" if path else models.EXTRA_STATE
            found.setdefault(part, []).append(name)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    """A tensor of a file that goes to these slots, on one device.

    Attributes:
        slots: names of one tensor of the model.
        source: the file.
        key: the tensor's name in the file.
        device: where it goes.
        dtype: that it gets.
    """

    slots: list[Slot]
    source: Source
    key: str
    device: torch.device
    dtype: torch.dtype

    @property
    def own(self) -> torch.Tensor:
        """The model's own tensor."""
        return self.slots[0].tensor

    @property
    def is_in_place(self) -> bool:
        """True if values can be read into the model's own tensor."""
        same = tensors.is_same_device(self.own.device, self.device) and self.own.dtype == self.dtype
        return same and not self.own.is_meta and self.own.is_contiguous()

    def target(self) -> torch.Tensor:
        """Return the tensor to read into: the model's own, or a new one."""
        if self.is_in_place:
            return self.own.detach()
        return torch.empty(self.own.shape, dtype=self.dtype, device=self.device)


@dataclass(kw_only=True, slots=True)
class Loading:
    """Collects the values that a checkpoint has for a model; `run` loads them.

    Attributes:
        model: gets the values.
        sources: the files.
        known: names that a file may have; set by `check_names`.
        folder: for weights that stay on the disk and are in no safetensors file.
    """

    model: nn.Module
    sources: Sequence[Source]
    folder: PathLike | None
    known: set[str] = field(default_factory=set)
    _places: dict[str, tuple[Source, str]] = field(default_factory=dict)
    _twins: dict[str, str] = field(default_factory=dict)
    _values: list[_Value] = field(default_factory=list)
    _empty: list[tuple[Slot, torch.dtype]] = field(default_factory=list)
    _index: dict[str, dict[str, Any]] = field(default_factory=dict)
    _extras: list[tuple[nn.Module, Source, str]] = field(default_factory=list)
    _written: list[tuple[list[Slot], Source, str, torch.dtype]] = field(default_factory=list)
    _quantized: list[tuple[list[Slot], Source, str, str | torch.device]] = field(default_factory=list)

    @property
    def on_disk(self) -> list[str]:
        """The names of the weights that stay on the disk."""
        written = [slots for slots, *_ in self._written]
        written += [slots for slots, _, _, device in self._quantized if device == "disk"]
        return [*self._index, *(slot.name for slots in written for slot in slots)]

    def check_names(self, groups: Sequence[Sequence[Slot]], *, strict: bool, whole: bool) -> None:
        """Match the names of the files with those of the model.

        Args:
            groups: the names of each tensor of the model.
            strict: all names have to match.
            whole: every tensor on the meta device has to get values.

        Raises:
            CheckpointError: names are missing or unknown that may not be.
        """
        extras = list_extra_states(self.model)
        extra_names = {plain_name(name) for names in extras.values() for name in names}
        known = {slot.name for group in groups for slot in group} | extra_names
        known.update(eight_bit.list_formats(self.model))
        self.known = known = set(map(plain_name, known))
        renamed = models.strip_prefixes({name for source in self.sources for name in source.shapes}, known)
        for source in self.sources:
            for key in (*source.shapes, *source.others):
                if key in source.shapes or renamed(key) in extra_names:
                    self._places[renamed(key)] = (source, key)
            for name, kept in source.twins.items():
                self._twins[renamed(name)] = renamed(kept)
        where = ", ".join(str(source.path) for source in self.sources)
        found = {part: self._find(names) for part, names in extras.items()}
        self._extras = [(part, *place) for part, place in found.items() if place is not None]
        empty = [
            group[0].name
            for group in groups
            if self.find_source(group) is None and not eight_bit.is_scales(group[0].owner, group[0].key)
        ]
        empty += [names[0] for part, names in extras.items() if found[part] is None]
        if not strict:
            metas = {slot.name for group in groups for slot in group if slot.tensor.is_meta}
            empty = [name for name in empty if whole and name in metas]
        if empty:
            reason = "" if strict else ", which are on the meta device"
            raise CheckpointError(f"{where} has no weights for {models.join_names(empty)}{reason}")
        if strict and (unknown := sorted(self._places.keys() - known)):
            raise CheckpointError(
                f"{where} has weights that the model does not know: {models.join_names(unknown)}"
            )

    def find_source(self, group: Sequence[Slot]) -> tuple[Source, str] | None:
        """Return where the values of a tensor are.

        Args:
            group: the tensor's names.

        Returns:
            The file and the name there; None if no file has the values.
        """
        return self._find(slot.name for slot in group)

    def _find(self, names: Iterable[str]) -> tuple[Source, str] | None:
        """Return where the first of these names is that a file has, or has under the name of a twin."""
        own = map(plain_name, names)
        candidates = (known for name in own for known in (name, self._twins.get(name)))
        return next((self._places[name] for name in candidates if name in self._places), None)

    def add(
        self, slots: list[Slot], source: Source, key: str, *, device: str | torch.device, dtype: torch.dtype
    ) -> None:
        """Note that a value goes to a device, or stays on the disk.

        Args:
            slots: names of one tensor of the model.
            source: the file.
            key: the tensor's name in the file.
            device: where it goes; the text `disk` leaves it on the disk.
            dtype: that it gets.

        Raises:
            CheckpointError: the file has another shape than the model.
        """
        shape = source.shapes[key]
        if shape != tuple(slots[0].tensor.shape):
            raise CheckpointError(
                f"{source.path}: {key!r} has shape {list(shape)}, the model's {list(slots[0].tensor.shape)}"
            )
        if self._needs_quantizing(slots) and not (isinstance(device, torch.device) and device.type == "meta"):
            self._quantized.append((slots, source, key, device))
            return
        if isinstance(device, torch.device):
            if device.type == "meta":
                self._empty += [(slot, dtype) for slot in slots]
            else:
                self._values.append(_Value(slots=slots, source=source, key=key, device=device, dtype=dtype))
            return
        self._empty += [(slot, dtype) for slot in slots]
        place = source.locate(key)
        if place is None:
            self._written.append((slots, source, key, dtype))
            return
        name_of_dtype = str(dtype).removeprefix("torch.")
        for slot in slots:
            self._index[slot.name] = {
                "safetensors_file": str(place[0].resolve()),
                "weight_name": place[1],
                "dtype": name_of_dtype,
            }

    def _needs_quantizing(self, slots: Sequence[Slot]) -> bool:
        """Return True for the weight of an 8-bit layer whose file has no scales: it is not in 8 bits there."""
        if not isinstance(slots[0].owner, eight_bit.Linear8bit) or slots[0].key != "weight":
            return False
        return self._find(f"{slot.name.removesuffix(slot.key)}{eight_bit.SCALES}" for slot in slots) is None

    def check_folder(self) -> None:
        """Check that weights that have to be written to the folder can be.

        Raises:
            ValueError: there is no folder, or it is a file.
            CheckpointError: it has no room.
        """
        # the scales of 8-bit weights are small
        written = [(slots, source, key, dtype.itemsize) for slots, source, key, dtype in self._written]
        written += [
            (slots, source, key, 1) for slots, source, key, device in self._quantized if device == "disk"
        ]
        if not written:
            return
        first, source, key, _ = written[0]
        if self.folder is None:
            raise ValueError(
                f"{first[0].name!r} stays on the disk, and {source.path} is no file to read it from as it is: give an "
                "offload_folder"
            )
        needed = sum(slots[0].tensor.numel() * size for slots, _, _, size in written)
        folder = Path(self.folder)
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ValueError(f"offload_folder {folder}: {there} is a file")
        if needed > (free := shutil.disk_usage(there).free):
            raise CheckpointError(
                f"{folder} has room for {free:,} bytes, and weights of {source.path} need {needed:,} there, among them "
                f"{key!r} of shape {list(source.shapes[key])}"
            )

    def run(self) -> dict[str, dict[str, Any]]:
        """Load all values, and return the index of the weights that stay on the disk."""
        for source in self.sources:
            source.verify([v.key for v in self._values if v.source is source and v.is_in_place])
        quantized = self._read_quantized()
        extras = [(module, source.read_entry(key)) for module, source, key in self._extras]
        pairs = [(value, value.target()) for value in self._values]
        # new tensors of all files first, then the folder, which an error empties again: what is read into the model's
        # own tensors cannot be undone
        _read_all([pair for pair in pairs if not pair[0].is_in_place])
        index = {**self._index, **self._write()}
        _read_all([pair for pair in pairs if pair[0].is_in_place])
        for value, target in pairs:
            made = value.own if value.is_in_place else like_parameter(value.own, target)
            for slot in value.slots:
                tensors.put(slot.owner, slot.key, made)
        for slots, values in quantized:
            for key, tensor in values.items():
                made = nn.Parameter(tensor, requires_grad=False)
                for slot in slots:
                    tensors.put(slot.owner, key, made)
        empty: dict[int, torch.Tensor] = {}
        for slot, dtype in self._empty:
            if not slot.tensor.is_meta or slot.tensor.dtype != dtype:
                made = like_parameter(slot.tensor, slot.tensor.detach().to("meta", dtype))
                tensors.put(slot.owner, slot.key, empty.setdefault(id(slot.tensor), made))
        for module, state in extras:
            module.set_extra_state(state)
        conversion.note_conversion(self.model, self.sources)
        return index

    def _write(self) -> dict[str, dict[str, Any]]:
        """Write weights that are in no safetensors file to the folder, one after the other."""
        index: dict[str, Any] = {}
        if not any(name not in self._index for name in self.on_disk):
            return index
        folder = Path(str(self.folder))
        new = not folder.exists()
        try:
            for source, wanted in self._group_written():
                for key, value in source.read_together(list(wanted)):
                    for slots, dtype in wanted[key]:
                        for slot in slots:
                            offload.offload_weight(value.to(dtype), slot.name, folder, index)
            for slots, source, key, device in self._quantized:
                if device != "disk":
                    continue
                for name, value in zip(eight_bit.TENSORS, _quantize(source, key), strict=True):
                    for slot in slots:
                        full = f"{slot.name.removesuffix(slot.key)}{name}"
                        offload.offload_weight(value, full, folder, index)
        except BaseException:
            for name in index:
                (folder / f"{name}.dat").unlink(missing_ok=True)
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return index

    def _group_written(self) -> Iterator[tuple[Source, dict[str, list[tuple[list[Slot], torch.dtype]]]]]:
        """Yield the files with weights to write: the slots and the dtype of each, by its name in the file."""
        for one in self.sources:
            wanted: dict[str, list[tuple[list[Slot], torch.dtype]]] = {}
            for slots, source, key, dtype in self._written:
                if source is one:
                    wanted.setdefault(key, []).append((slots, dtype))
            yield one, wanted

    def _read_quantized(self) -> list[tuple[list[Slot], dict[str, torch.Tensor]]]:
        """Return new tensors of the 8-bit layers whose weights do not stay on the disk, by their names there."""
        here = [
            (slots, source, key, device)
            for slots, source, key, device in self._quantized
            if isinstance(device, torch.device)
        ]
        # all before the first is quantized: else each of them keeps memory of the system around it that was freed
        made = [
            {
                name: torch.empty_like(getattr(slots[0].owner, name), device=device)
                for name in eight_bit.TENSORS
            }
            for slots, _, _, device in here
        ]
        for (_, source, key, _), own in zip(here, made, strict=True):
            for name, value in zip(eight_bit.TENSORS, _quantize(source, key), strict=True):
                own[name].copy_(value)
        return [(slots, own) for (slots, *_), own in zip(here, made, strict=True)]


def _quantize(source: Source, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in int8 and its scales."""
    value = torch.empty(source.shapes[key], dtype=torch.float16, device="cpu")
    _read(source, {key: value})
    return eight_bit.quantize(value)


@torch.no_grad()
def _read_all(pairs: list[tuple[_Value, torch.Tensor]]) -> None:
    """Read each value into the tensor beside it."""
    while pairs:
        source = pairs[0][0].source
        targets = {value.key: target for value, target in reversed(pairs) if value.source is source}
        _read(source, targets)
        # one name may be wanted on several devices
        pairs = [p for p in pairs if p[0].source is not source or targets[p[0].key] is not p[1]]


def _read(source: Source, targets: dict[str, torch.Tensor]) -> None:
    try:
        source.read_into(targets)
    except OSError as error:
        raise CheckpointError(
            f"{source.path} cannot be read for {models.join_names(list(targets))}: {error}"
        ) from error
