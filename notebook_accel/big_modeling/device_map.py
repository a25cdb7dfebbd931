"""Decides which device each part of a model goes to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import devices
from ..caller import warn
from ..checkpointing.models import is_extra_state, join_names
from ..hooks.tensors import as_device, named_module_tensors, non_persistent_buffers
from . import limits, sizes, ties
from .explanation import Explanation
from .sizes import DtypeLike, Named, is_within
from .ties import Device

DeviceMap = Mapping[str, Device]
_log = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: limits.Limits | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device for each part of the model: GPUs are filled in order, then the CPU, then the disk.

    Layers of the CPU and of the disk compute on the first GPU, or on the CPU if there is no GPU. That device keeps room
    for the largest of the layers that are not placed before it. Weights that are shared stay together.

    Args:
        model: on any device, best on the meta device.
        max_memory: bytes or texts such as `10GiB` by device, see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay whole. By default the names that the model has in
            `_no_split_modules`; `[]` for none.
        dtype: that the weights will have; those that are smaller already stay as they are.
        special_dtypes: other dtypes by name.
        verbose: print a table of where each part went, and why.
        clean_result: name a module instead of all parts in it if these are on one device.
        offload_buffers: do not keep buffers of parts that leave a GPU there.
        fallback_allocation: if the next part does not fit an empty device, place a later part there that fits.

    Returns:
        A device by name: a number of a GPU, `mps`, `cpu` or `disk`.
    """
    planner = _Planner(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, fallback=fallback_allocation
    )
    found = planner.run()
    if verbose:
        print(planner.explanation.format(planner.used, planner.limits, planner.total))
    if not offload_buffers:
        planner.warn_of_buffers(found, dtype, special_dtypes)
    return clean_device_map(found) if clean_result else found


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name a module instead of the parts in it if all these are on one device.

    Args:
        device_map: a device by name; it is changed in place.
        module_name: where to begin.

    Returns:
        The same map.
    """
    inside = [name for name in device_map if is_within(name, module_name)]
    places = {device_map[name] for name in inside}
    if len(places) == 1 and len(inside) > 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = places.pop()
        return device_map
    depth = len(module_name.split(".")) if module_name else 0
    children = dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in inside if name != module_name)
    for child in children:
        clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that a map gives every tensor a device; warn of names that the model does not have.

    Args:
        model: with the tensors.
        device_map: a device by name.

    Raises:
        ValueError: a tensor has no device, or a device is not legal.
    """
    check_devices(device_map)
    tensors = [name for name in model.state_dict(keep_vars=True) if not is_extra_state(name)]
    known = {name for name, _ in model.named_modules()} | set(tensors)
    known |= {name for name, _ in named_module_tensors(model, recurse=True)}
    if unknown := sorted(name for name in device_map if name not in known):
        warn(f"the device map names what the model does not have: {unknown}")
    lost = [name for name in tensors if ties.find_device(name, device_map) is None]
    if lost:
        raise ValueError(f"the device map says no device for {join_names(lost)}")


def check_buffers(model: nn.Module) -> None:
    """Check that every buffer without values can get them from a checkpoint.

    Args:
        model: with the buffers.

    Raises:
        ValueError: a buffer is on the meta device and not in the state dict.
    """
    transient = non_persistent_buffers(model, recurse=True)
    if lost := [name for name, buffer in model.named_buffers() if name in transient and buffer.is_meta]:
        raise ValueError(
            f"{join_names(lost)} of the model are on the meta device, and buffers that are not in its state dict get "
            "values only while it is built: build it by init_empty_weights(include_buffers=False)"
        )


def check_devices(device_map: DeviceMap) -> None:
    """Check that a map names legal devices, whether or not they exist here.

    Args:
        device_map: a device by name.

    Raises:
        ValueError: it is no mapping, or a device is not legal.
    """
    if not isinstance(device_map, Mapping):
        raise ValueError(f"a device map says a device for each part by name, {device_map!r} is none")
    for name, device in device_map.items():
        try:
            legal = device == "disk" or as_device(device) is not None
        except (RuntimeError, TypeError):
            legal = False
        if not legal:
            raise ValueError(
                f"the device map puts {name!r} on {device!r}: choose a number of a GPU, a device of torch, 'cpu' or "
                "'disk'"
            )


def check_devices_exist(device_map: DeviceMap) -> None:
    """Check that this machine has the accelerators of a map.

    Args:
        device_map: a device by name.

    Raises:
        ValueError: one of them does not exist.
    """
    for name, device in device_map.items():
        target = None if device == "disk" else as_device(device)
        if target is None or target.type not in (*devices.list_modules(), devices.MPS.name):
            continue
        count = devices.count(target.type)
        if (target.index or 0) >= count:
            raise ValueError(
                f"the device map puts {name!r} on {device!r}, and torch finds {count} {target.type} devices here: "
                "choose 'cpu', 'disk' or one that is there"
            )


class _Planner:
    """Fills one device after the other with the parts of a model."""

    def __init__(
        self,
        model: nn.Module,
        max_memory: limits.Limits | None,
        no_split: str | Sequence[str] | None,
        dtype: DtypeLike | None,
        special_dtypes: Mapping[str, DtypeLike] | None,
        *,
        fallback: bool,
    ) -> None:
        self.limits = limits.get_max_memory(max_memory)
        self.devices: list[int | str] = [*self.limits, *([] if "disk" in self.limits else ["disk"])]
        gpus = [device for device in self.devices if device not in ("cpu", "disk")]
        self.main = {gpus[0], "cpu"} if gpus else {"cpu"}
        if "mps" in gpus:
            self.main = {"mps"}
        self.whole = set(sizes.find_whole_classes(model, no_split))
        self.sizes = sizes.compute_module_sizes(model, dtype, special_dtypes)
        self.ties = ties.find_tied_parameters(model)
        self.fallback = fallback
        self.waiting: list[Named] = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        self.used: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.reserved: dict[int | str, int] = dict.fromkeys(self.devices, 0)
        self.lacking: dict[int | str, int] = {}
        self.result: dict[str, int | str] = {}
        self.explanation = Explanation()
        self.total = self.sizes.get("", 0)
        self.model = model
        self._largest: tuple[int, list[str]] = (0, [])
        if not self.ties and ties.check_tied_parameters_in_config(model):
            warn(
                "the config says that weights are shared, and this model has none that are: "
                "call model.tie_weights() before a device map is made",
            )

    def run(self) -> dict[str, int | str]:
        """Return a device by name."""
        self._measure()
        number = 0
        while self.waiting:
            name, part = self.waiting.pop(0)
            self._drop_from_largest(name)
            number += self._try_part(name, part, self.devices[number])
        if self.lacking:
            texts = ", ".join(f"{device!r} by {size:,} bytes" for device, size in self.lacking.items())
            _log.info(
                "devices that are too small for the part that was next: %s; fallback_allocation=True looks for "
                "parts that fit",
                texts,
            )
        return self.result

    def _try_part(self, name: str, part: Any, device: int | str) -> int:
        """Place, split or put back a part; return 1 if the next device comes after this."""
        size, tied = self._with_ties(name)
        limit = self.limits.get(device) if device != "disk" else None
        reserved = self._largest[0] if device in self.main else 0
        room = None if limit is None else limit - reserved - self.used[device]
        if room is None or size <= room:
            self._place(name, size, tied, device)
            return 0
        if self.sizes.get(name, 0) <= room and tied:
            if self._split_tied(name, part, tied):
                return 0
            why = f"shares weights with {', '.join(one for one, _ in tied)}"
        elif self._can_split(part):
            self.explanation.add_split(name, size, device, room)
            self.waiting = self._children(name, part) + self.waiting
            self._measure()
            return 0
        else:
            kind = type(part).__name__
            why = f"{kind} stays whole" if kind in self.whole else "cannot be split"
        self.waiting.insert(0, (name, part))
        if self.used[device] == 0 and self.fallback and self._look_further(room):
            return 0
        if self.used[device] == 0:
            self.lacking[device] = size + reserved
        self.reserved[device] = reserved
        self.explanation.add_too_large(name, size, device, room, reserved, why)
        return 1

    def _place(self, name: str, size: int, tied: list[Named], device: int | str) -> None:
        self.used[device] += size
        self.result[name] = device
        for other, _ in tied:
            self.waiting = [item for item in self.waiting if item[0] != other]
            self.result[other] = device
        self.explanation.add_placed(name, size, device, [other for other, _ in tied])

    def _with_ties(self, name: str) -> tuple[int, list[Named]]:
        """Return the bytes of a part along with parts that share its weights, and these parts.

        A weight that is shared counts in one of them only, whichever comes first in the model.
        """
        size = self.sizes.get(name, 0)
        tied: list[Named] = []
        for other in ties.find_tied_elsewhere(name, self.ties):
            item = next((item for item in self.waiting if is_within(other, item[0])), None)
            if item is None or item[0] in [one for one, _ in tied]:
                continue
            tied.append(item)
            size += self.sizes.get(item[0], 0)
        return size, tied

    def _can_split(self, part: Any) -> bool:
        if isinstance(part, torch.Tensor) or type(part).__name__ in self.whole:
            return False
        return next(part.named_children(), None) is not None

    @staticmethod
    def _children(name: str, part: nn.Module) -> list[Named]:
        inside: list[Named] = [
            *part.named_parameters(recurse=False),
            *part.named_children(),
            *part.named_buffers(recurse=False),
        ]
        return [(f"{name}.{key}", item) for key, item in inside]

    def _split_tied(self, name: str, part: Any, tied: list[Named]) -> bool:
        """Split the first part of these that can be split; the part itself is tried again later."""
        for other, module in tied:
            if not self._can_split(module):
                continue
            at = next(number for number, item in enumerate(self.waiting) if item[0] == other)
            self.waiting[at : at + 1] = self._children(other, module)
            self.waiting.insert(0, (name, part))
            self.explanation.add_split(other, self.sizes.get(other, 0), None, None)
            self._measure()
            return True
        return False

    def _look_further(self, room: int) -> bool:
        """Bring the first part that fits to the front; parts on the way to it are split."""
        waiting = list(self.waiting)
        place = 0
        while place < len(waiting):
            name, part = waiting[place]
            rest = self.waiting
            self.waiting = waiting[:place] + waiting[place + 1 :]
            size, _ = self._with_ties(name)
            self.waiting = rest
            if size <= room:
                self.waiting = [waiting[place], *waiting[:place], *waiting[place + 1 :]]
                self._measure()
                return True
            if self._can_split(part):
                waiting[place : place + 1] = self._children(name, part)
            else:
                place += 1
        return False

    def _measure(self) -> None:
        """Find the largest of the layers that are not placed."""
        modules = [item for item in self.waiting if isinstance(item[1], nn.Module)]
        size, names = sizes.get_max_layer_size(modules, self.sizes, list(self.whole))
        self._largest = (size, names)

    def _drop_from_largest(self, name: str) -> None:
        """Search the largest layer again if a part with this name was the last of that size."""
        left = [one for one in self._largest[1] if not is_within(one, name)]
        if left:
            self._largest = (self._largest[0], left)
        else:
            self._measure()

    def warn_of_buffers(
        self,
        found: Mapping[str, int | str],
        dtype: DtypeLike | None,
        special_dtypes: Mapping[str, DtypeLike] | None,
    ) -> None:
        """Warn if a GPU has no room for the buffers of parts that are on none: they stay there.

        Args:
            found: the device map.
            dtype: as in `infer_auto_device_map`.
            special_dtypes: as in `infer_auto_device_map`.
        """
        gpus = [device for device in self.limits if device not in ("cpu", "disk")]
        if not gpus:
            return
        by_name = sizes.compute_module_sizes(self.model, dtype, special_dtypes, buffers_only=True)
        tensors = [name for name, _ in self.model.named_buffers()]
        away = sum(by_name[name] for name in tensors if ties.find_device(name, found) in ("cpu", "disk"))
        room = max(self.limits[device] - self.used[device] - self.reserved[device] for device in gpus)
        if away > max(room, 0):
            warn(
                f"buffers of the parts that are on no GPU need {away:,} bytes on one, which leaves {max(room, 0):,}: "
                "offload_buffers=True keeps them with their parts",
            )
