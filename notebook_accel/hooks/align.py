"""The hook that brings a module's weights and its inputs to the device that computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ..nested import send_to_device
from . import tensors
from .base import (
    ModelHook,
    SequentialHook,
    has_forward,
    outside_graphs,
    remove_hook_from_module,
    single_hooks,
)
from .lease import ReentrantLease
from .offloaded_tensor import like_parameter, make_offloaded
from .prefetch import Need, Prefetcher
from .tensors import Device, TiedMap
from .weights import get_lasting


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """A place for a weight of this shape: `name` of the mapping goes to `key` of the owner, else `empty` is there."""

    owner: nn.Module
    key: str
    name: str
    shape: torch.Size
    empty: torch.Tensor


class AlignDevicesHook(ModelHook):
    """Keeps a module on a device, or brings its weights there for each forward, and its inputs too.

    Args:
        execution_device: where the module computes; None leaves it and its inputs where they are.
        offload: put the weights on the meta device between forwards. So are those of modules inside that cannot be
            called, such as a `ParameterList`.
        io_same_device: bring the output to where the first input was.
        weights_map: has the offloaded weights, by their names in the module; without it they are kept on the CPU.
        offload_buffers: offload buffers too.
        place_submodules: do this for the modules inside as well.
        skip_keys: keys of keyword arguments and of outputs that stay where they are.
        tied_params_map: copies of shared weights, by address and device.
        prefetcher: fetches weights before they are needed, together with those of other modules.

    Attributes:
        leads: in the hook of the whole model, the prefetcher to tell where a forward begins and ends.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: TiedMap | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self._need: Need | None = None
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.prefetcher = prefetcher
        self.leads: Prefetcher | None = None
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._slots: list[_Slot] = []
        self._handles: list[RemovableHandle] = []
        self._lease = ReentrantLease()

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules")
        texts = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*shown, "skip_keys"))
        return f"AlignDevicesHook({texts})"

    @property
    def weights_map(self) -> Mapping[str, torch.Tensor] | None:
        """The offloaded weights; whoever changes weights, as PEFT does in a merge, assigns a mapping that has them."""
        return self._weights_map

    @weights_map.setter
    def weights_map(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        self._weights_map = weights
        if self._need is None or weights is None:
            return
        need = replace(self._need, weights=weights)
        if self.prefetcher is not None:
            self.prefetcher.replace(self._need, need)
        self._need = need

    def init_hook(self, module: nn.Module) -> nn.Module:
        device = self.execution_device
        if not self.offload:
            if device is not None:
                for name, _ in self._tensors(module, include_buffers=True):
                    tensors.set_module_tensor_to_device(
                        module, name, device, tied_params_map=self.tied_params_map
                    )
            return module
        everything = dict(self._tensors(module, include_buffers=True))
        self.original_devices = {name: tensor.device for name, tensor in everything.items()}
        moved = dict(self._tensors(module, include_buffers=self.offload_buffers, in_state=True))
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in moved.items()}
        self._offload_weights(module)
        if device is not None:
            for name in everything.keys() - moved.keys():
                is_mapped = everything[name].is_meta and name in self.weights_map
                value = get_lasting(self.weights_map, name) if is_mapped else None
                tensors.set_module_tensor_to_device(module, name, device, value=value)
        if self._need is not None and self.prefetcher is not None:
            self.prefetcher.expect(self._need)
        return module

    def parts_of(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules, by their names in this one, whose weights come and go with its own."""
        if self.place_submodules:
            yield from module.named_modules()
        else:
            yield from with_uncallable(module) if self.offload else [("", module)]

    def _tensors(
        self, module: nn.Module, *, include_buffers: bool, in_state: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        seen = set[int]()
        for path, part in self.parts_of(module):
            for key, tensor in tensors.named_module_tensors(
                part, include_buffers, remove_non_persistent=in_state
            ):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}" if path else key, tensor

    def _offload_weights(self, module: nn.Module) -> None:
        """Put the weights on the meta device, and note where each belongs; a shared one is fetched once."""
        names: dict[int, str] = {}
        places: Any = WeakTensorKeyDictionary() if self.prefetcher is None else self.prefetcher.places
        needed: dict[str, torch.Tensor] = {}
        for path, part in self.parts_of(module):
            tables: list[dict[str, Any]] = [part._parameters]
            if self.offload_buffers:
                transient = part._non_persistent_buffers_set
                tables.append({key: item for key, item in part._buffers.items() if key not in transient})
            for table in tables:
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                    if tensor not in places:
                        places[tensor] = make_offloaded(tensor)
                    needed[name] = places[tensor]
                    self._slots.append(
                        _Slot(owner=part, key=key, name=name, shape=tensor.shape, empty=places[tensor])
                    )
        self._empty_slots()
        for owner in {id(slot.owner): slot.owner for slot in self._slots}.values():
            self._handles.append(owner.register_load_state_dict_pre_hook(self._before_load))
        if needed:
            assert self.weights_map is not None
            self._need = Need(
                weights=self.weights_map,
                names=tuple(needed),
                places=tuple(needed.values()),
                device=self._device(),
                nbytes=sum(tensor.nbytes for tensor in needed.values()),
            )

    def _before_load(self, owner: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take the values of offloaded weights out of a state dict.

        A value that differs from the weight's is an error, which torch raises at the end.
        """
        errors: list[str] = others[-1]
        assert self.weights_map is not None
        for slot in self._slots:
            given = state.get(prefix + slot.key)
            is_away = owner._parameters.get(slot.key, owner._buffers.get(slot.key)) is slot.empty
            if slot.owner is not owner or not is_away or not isinstance(given, torch.Tensor) or given.is_meta:
                continue
            if given.shape != slot.shape:
                continue  # torch says so
            own = self.weights_map[slot.name]
            given = given.to(own)
            if not ((own == given) | (own.isnan() & given.isnan())).all():
                errors.append(
                    f"{prefix + slot.key!r} is offloaded, and load_state_dict has other values for it: load them with "
                    "load_checkpoint_and_dispatch, or load_checkpoint_in_model before the model is dispatched"
                )
            state[prefix + slot.key] = slot.empty

    def _device(self) -> torch.device:
        return (
            torch.device("cpu") if self.execution_device is None else tensors.as_device(self.execution_device)
        )

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.leads is not None:
            self.leads.begin()
        if self.io_same_device:
            self.input_device = tensors.find_device([args, kwargs])
        if self._need is not None and self._lease.acquire():
            self._put(self._need.fetch() if self.prefetcher is None else self.prefetcher.take(self._need))
            self._need.check()
        if self.execution_device is None:
            return args, kwargs
        device = tensors.as_device(self.execution_device)
        sent: tuple[Any, ...] = send_to_device(args, device)
        return sent, send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _put(self, found: Mapping[str, torch.Tensor]) -> None:
        """Put weights in their places; ValueError for one of another shape."""
        made: dict[str, torch.Tensor] = {}
        for slot in self._slots:
            if slot.name not in made:
                if found[slot.name].shape != slot.shape:
                    raise ValueError(
                        f"{slot.name!r} of {type(slot.owner).__name__} has shape {list(slot.shape)}, "
                        f"the value {list(found[slot.name].shape)}"
                    )
                made[slot.name] = like_parameter(slot.empty, found[slot.name])
            tensors.put(slot.owner, slot.key, made[slot.name])

    @outside_graphs
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self._need is not None:
            self._need.check()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        self._lease.release(self._empty_slots)
        if self.leads is not None:
            self.leads.end()
        return output

    @outside_graphs
    def after_error(self, module: nn.Module, error: BaseException) -> None:
        self._lease.release(self._empty_slots)
        if self.leads is None:
            return
        self.leads.end(whole=False)
        text = str(error)
        # add_note is there from Python 3.11 on
        if "meta" in text and "preload_module_classes" not in text and hasattr(error, "add_note"):
            error.add_note(
                "offloaded weights are brought back for the forward of their own module: where another module or a "
                "pre-hook uses them, name the class of a module around both in preload_module_classes"
            )

    def _empty_slots(self) -> None:
        for slot in self._slots:
            tensors.put(slot.owner, slot.key, slot.empty)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if not self._slots:
            return module
        assert self.weights_map is not None
        made: Any = WeakTensorKeyDictionary() if self.prefetcher is None else self.prefetcher.back
        for slot in self._slots:
            device = self.original_devices.get(slot.name)
            if device is None:
                continue
            if device.type == "meta":  # it never had values in memory
                device = torch.device("cpu")
            if slot.empty not in made or made[slot.empty].device != device:
                value = get_lasting(self.weights_map, slot.name).to(device=device, dtype=slot.empty.dtype)
                made[slot.empty] = like_parameter(slot.empty, value)
            tensors.put(slot.owner, slot.key, made[slot.empty])
        self.forget()
        return module

    def forget(self) -> None:
        """Leave the module with what is in the places of its weights now."""
        for handle in self._handles:
            handle.remove()
        self._slots, self._handles, self._need = [], [], None

    @contextlib.contextmanager
    def bring_weights(self, module: nn.Module, device: Device | None = None) -> Iterator[None]:
        """Within the block the module has its weights.

        Args:
            module: the one that has this hook.
            device: where the weights are; by default where the module computes.
        """
        need = self._need
        if need is None:
            yield
            return
        if device is not None:
            need = replace(need, device=tensors.as_device(device))
        self._lease.acquire()
        try:
            self._put(need.fetch())
            yield
        finally:
            self._lease.release(self._empty_slots)


def with_uncallable(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, and the modules inside that have no forward: only this module can use their weights.

    Args:
        module: the outer one.
        prefix: its name.

    Yields:
        The full name and the module.
    """
    yield prefix, module
    for name, child in module.named_children():
        if not has_forward(child):
            yield from with_uncallable(child, f"{prefix}.{name}" if prefix else name)


def align_hooks(hook: ModelHook | None) -> Iterator[AlignDevicesHook]:
    """Yield the hooks of this kind in a module's hook, which may be several as one."""
    return (one for one in single_hooks(hook) if isinstance(one, AlignDevicesHook))


def remove_offload_hooks(model: nn.Module) -> None:
    """Remove the hooks that offload weights, and leave the weights offloaded: other hooks will bring them."""
    for part in model.modules():
        present = list(single_hooks(vars(part).get("_hf_hook")))
        kept = [hook for hook in present if not (isinstance(hook, AlignDevicesHook) and hook.offload)]
        if len(kept) == len(present):
            continue
        for hook in align_hooks(vars(part)["_hf_hook"]):
            if hook.offload:
                hook.forget()
        if kept:
            vars(part)["_hf_hook"] = kept[0] if len(kept) == 1 else SequentialHook(*kept)
        else:
            remove_hook_from_module(part)


def align_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads the module's weights, None where there is none."""
    return next((hook for hook in align_hooks(vars(module).get("_hf_hook")) if hook.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True if a hook offloads the module's own weights between forwards."""
    return align_hook(module) is not None


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Within the block the module's own weights are on the device where it computes, or on another one.

    Args:
        module: its weights may be offloaded between forwards; those of modules inside stay where they are.
        execution_device: by default where the module computes.
    """
    hook = align_hook(module)
    if hook is not None:
        with hook.bring_weights(module, execution_device):
            yield
        return
    if execution_device is None:
        yield
        return
    device = tensors.as_device(execution_device)
    # a module around this one brings those on the meta device
    own = {name: tensor for name, tensor in module.named_parameters(recurse=False) if not tensor.is_meta}
    homes = {name: tensor.device for name, tensor in own.items()}
    try:
        for tensor in own.values():
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for name, tensor in own.items():
            tensor.data = tensor.data.to(homes[name])
