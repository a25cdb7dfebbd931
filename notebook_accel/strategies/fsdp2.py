"""Training with weights, gradients and optimizer state sharded over the processes by torch's fully_shard."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final

import torch

from .. import collector, environ, fp8, gradients
from ..caller import warn
from ..checkpointing import sharded
from ..checkpointing.parts import CollectiveFolder, Parts
from ..combinations import refuse
from ..comm import torch_dist
from ..comm.base import Comm
from ..compilation import TorchDynamoPlugin, compile_model, plain_name
from ..dtensors import is_sharded, shard_like, to_full
from ..fsdp import FullyShardedDataParallelPlugin, enable_fsdp_ram_efficient_loading
from ..parallelism import ParallelismConfig
from ..precision import Precision
from ..runtime import Runtime, slot
from . import blocks, context_parallel, filling, meshes, tensor_parallel
from .base import Bundle, Plugins, Strategy, unwrap
from .single import SingleDevice

_UNFILLED: Final = "ignored modules, or weights of other classes"


class FullySharded(SingleDevice):
    """Shards each block of a model, and what is left of it, over the processes; the model stays the user's object.

    All processes start with rank 0's weights. Layers are split too where there is tensor parallel.
    """

    shards_weights: ClassVar[bool] = True
    unpicklable: ClassVar[str] = "FSDP"

    def __init__(
        self,
        runtime: Runtime,
        precision: Precision,
        plugin: FullyShardedDataParallelPlugin,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(runtime, precision)
        self.plugin = plugin
        self.parallelism = parallelism
        self._owns_group = meshes.ensure_group(runtime)
        device = runtime.device.type
        self.mesh: Any = parallelism.get_device_mesh(device) if parallelism is not None else None
        self._shards = meshes.for_sharding(runtime, plugin.strategy, parallelism, self.mesh)
        self._splits: Any = None
        if self.mesh is not None and parallelism is not None and parallelism.tp_enabled:
            self._splits = self.mesh["tp"]
        self._units: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._needs_scales = False
        self._quiet: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._background: Any = None
        if precision.scaler is not None:
            precision.scaler.share(runtime.comm)

    @classmethod
    def check(cls, runtime: Runtime, mode: str, plugins: Plugins) -> None:
        config = plugins.parallelism
        if plugins.fsdp is not None:
            meshes.check_precision(plugins.fsdp, mode)
        if config is not None and config.cp_enabled and runtime.device.type == "cpu":
            raise refuse("cp, cpu", config.equation())
        if config is not None and config.sizes["dp_replicate"] == config.total_size > 1:
            raise refuse("copies, fsdp", config.equation())

    @classmethod
    def create(cls, runtime: Runtime, precision: Precision, plugins: Plugins) -> Strategy:
        plugin = plugins.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2)
        strategy = cls(runtime, precision, plugin, plugins.parallelism)
        if plugin.cpu_ram_efficient_loading and runtime.topology.world_size > 1:
            before = environ.snapshot()
            enable_fsdp_ram_efficient_loading()  # transformers looks at the environment
            slot().variables += tuple(environ.snapshot().keys() - before.keys())
        return strategy

    @property
    def saves_collectively(self) -> bool:
        return self.plugin.saves_shards  # users change it between checkpoints

    @property
    def num_shares(self) -> int:
        if self.parallelism is None:
            return self.runtime.topology.world_size
        return self.parallelism.data_parallel_size

    @property
    def norm_comm(self) -> Comm | None:
        return None if self.plugin.ignored_modules is None else self.runtime.comm

    @functools.cached_property
    def data_comm(self) -> Comm:
        if self.parallelism is None or self.parallelism.non_data_parallel_size == 1:
            return self.runtime.comm
        return meshes.comm_of_data(self.runtime, self.parallelism, self.mesh)

    def prepare(self, bundle: Bundle) -> Bundle:
        for optimizer in bundle.optimizers:
            _check_optimizer(optimizer)
        with collector.pause():
            for model in bundle.models:
                self._shard(model)
        for optimizer in bundle.optimizers:
            self.follow(optimizer)
        return bundle

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        _check_optimizer(optimizer)
        super().follow(optimizer)

    @property
    def wraps_steps(self) -> bool:
        """Whether weights are sent in float8: the scales follow from a step."""
        return self._needs_scales or self._will_need_scales()

    def _will_need_scales(self) -> bool:
        recipe = self.precision.recipe
        return recipe is not None and self._shards is not None and recipe.config.enable_fsdp_float8_all_gather

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._units:
            if any(id(parameter) in stepped for parameter in model.parameters()):
                fp8.precompute_scales(model)

    def _switch(self, optimizer: torch.optim.Optimizer) -> None:
        super()._switch(optimizer)
        for parameter, state in optimizer.state.items():  # from steps before the optimizer was prepared
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = shard_like(value, parameter)
        for group in optimizer.param_groups:
            if not gradients.is_of_one_mesh(group["params"]):
                _step_one_by_one(optimizer, group)

    def _shard(self, model: torch.nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):  # by the user
            blocks.let_torch_divide(model, self.runtime.device)
            self.precision.apply(model)
            return
        if next(model.parameters(), None) is None:  # a loss, for example
            model.to(self.runtime.device)
            self.precision.apply(model)
            return
        if self._splits is not None:
            self._require_values(model, "layers that are split by tensor parallel")
        elif self._find_ignored(model) or not filling.is_plain(model):
            self._require_values(model, _UNFILLED)
        before = dict(model.named_parameters())
        if self.parallelism is not None and self.parallelism.cp_enabled:
            context_parallel.use_causal_attention(model)
        self.precision.convert(model, will_be_sharded=self._shards is not None)
        self._needs_scales |= self._will_need_scales()
        ignored = self._find_ignored(model)
        units = blocks.choose(model, self.plugin, ignored, warns=self.runtime.topology.is_main)
        if self._shards is not None:
            blocks.check_weights(model, units, ignored, are_widened=self.precision.is_mixed)
        self._widen(model)
        from_first = self.plugin.sync_module_states is not False
        if self._splits is not None:
            self._split(model)
        is_plain = filling.is_plain(model) and not ignored
        has_values = is_plain and filling.agree(model, self.runtime.comm, from_first=from_first)
        if self.plugin.activation_checkpointing:
            offloads = self.plugin.activation_checkpointing_offload
            blocks.recompute(units, offload=self.runtime.device if offloads else None)
        if is_plain:
            originals = filling.empty_out(model) if has_values else None
            self._fully_shard(model, units, ignored)
            if originals is not None:
                filling.fill(model, originals, self.runtime.comm, self._place_of, from_first=from_first)
            elif self.plugin.param_init_fn is not None:
                filling.materialize(model, self._place_of)
                for module in model.modules():
                    self.plugin.param_init_fn(module)
        else:
            if self._splits is None:
                self._require_values(model, _UNFILLED)  # weights for float8 may be of another class
            model.to(self.runtime.device)
            if from_first and self._splits is None:
                filling.copy_first(model, self.runtime.comm)
            self._fully_shard(model, units, ignored)
        self._cast_buffers(model)
        self.precision.wrap_forward(model)
        self._units[model] = [] if self._shards is None else [*units, model]
        after = dict(model.named_parameters())
        self._renew([(before[name], after[name]) for name in before if before[name] is not after[name]])

    def _fully_shard(
        self, model: torch.nn.Module, units: list[torch.nn.Module], ignored: set[torch.nn.Parameter]
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        if self._shards is None:  # layers are split, and nothing else
            model.to(self.runtime.device)
            return
        on_gpu = self.runtime.device.type != "cpu"
        offloads = self.plugin.offloads and on_gpu
        pins = getattr(self.plugin.cpu_offload, "pin_memory", True)
        options: dict[str, Any] = {
            "mesh": self._shards,
            "mp_policy": meshes.precision_policy(self.plugin, self.precision.mode),
            "offload_policy": CPUOffloadPolicy(pin_memory=pins) if offloads else OffloadPolicy(),
            "ignored_params": ignored or None,
        }
        reshards = self.plugin.strategy in ("FULL_SHARD", "HYBRID_SHARD")
        for unit in units:
            fully_shard(unit, reshard_after_forward=reshards, **options)
        fully_shard(model, **options)  # torch keeps the model's own weights gathered from forward to backward
        blocks.let_torch_divide(model, self.runtime.device)
        order = {id(part): place for place, part in enumerate(model.modules())}
        blocks.set_prefetching(sorted(units, key=lambda unit: order[id(unit)]), self.plugin)

    def _split(self, model: torch.nn.Module) -> None:
        """Split layers over the processes of `tp`, with rank 0's weights in all copies; split ones stay as they are."""
        assert self.parallelism is not None and self.parallelism.tp_handler is not None
        model.to(self.runtime.device)
        filling.copy_first(model, self.runtime.comm)
        if tensor_parallel.is_split(model):
            return
        tensor_parallel.split(model, self._splits, self.parallelism.tp_handler.plan)

    def _require_values(self, model: torch.nn.Module, what: str) -> None:
        """Raise ValueError in all processes where one has no values for the model."""
        if not filling.agree(model, self.runtime.comm, from_first=False):
            raise refuse("empty weights, split", what)

    def _widen(self, model: torch.nn.Module) -> None:
        """Make trainable weights float32 where layers compute in less, since gradients are added up in these."""
        if not self.precision.is_mixed:
            return
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32)

    def _cast_buffers(self, model: torch.nn.Module) -> None:
        dtype = getattr(self.plugin.mixed_precision_policy, "buffer_dtype", None)
        for buffer in model.buffers() if dtype is not None else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)

    def _place_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where a parameter or buffer lives between computations."""
        stays = self.plugin.offloads and is_sharded(tensor)
        return torch.device("cpu") if stays else self.runtime.device

    def _find_ignored(self, model: torch.nn.Module) -> set[torch.nn.Parameter]:
        return {
            parameter
            for module in meshes.find_ignored_modules(self.plugin, model)
            for parameter in module.parameters()
        }

    def compile(self, model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
        if not (plugin.is_active and plugin.use_regional_compilation):
            return compile_model(model, plugin)
        units = self._modules(model)
        for unit in units[:-1] or units:  # in place: a copy would not be sharded
            unit.compile(**plugin.to_kwargs())
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return self._syncing(model, False)

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return self._syncing(model, True)

    @contextmanager
    def _syncing(self, model: torch.nn.Module, wanted: bool) -> Iterator[None]:
        """Let backward reduce gradients over the processes, or not; afterwards as before."""
        inner = unwrap(model, keep_torch_compile=False)
        before = inner not in self._quiet
        self._set_sync(inner, wanted)
        try:
            yield
        finally:
            self._set_sync(inner, before)

    def _set_sync(self, inner: torch.nn.Module, wanted: bool) -> None:
        for module in self._modules(inner):
            module.set_requires_gradient_sync(wanted, recurse=False)
        (self._quiet.discard if wanted else self._quiet.add)(inner)

    def _modules(self, inner: torch.nn.Module) -> list[Any]:
        """Return the sharded modules of a model."""
        from torch.distributed.fsdp import FSDPModule

        if inner not in self._units:  # by the user
            self._units[inner] = [part for part in inner.modules() if isinstance(part, FSDPModule)]
        return self._units[inner]

    def joinable(self, model: Any) -> Any:
        raise refuse("shards, join")

    def holds_part(self, model: torch.nn.Module) -> bool:
        return any(map(is_sharded, unwrap(model, keep_torch_compile=False).parameters()))

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state on the first process of each node, and nothing on the others."""
        inner = unwrap(model, keep_torch_compile=False)
        keeps = self.runtime.topology.is_local_main
        return _whole(inner.state_dict(keep_vars=True), keeps)

    def weights(self, model: torch.nn.Module) -> dict[str, Any]:
        if not self.saves_collectively:
            return self.state_dict(model)
        state: dict[str, Any] = unwrap(model, keep_torch_compile=False).state_dict()
        return {plain_name(name): value for name, value in state.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        keeps = self.runtime.topology.is_local_main
        values = {number: _whole(entry, keeps) for number, entry in state["state"].items()}
        return {**state, "state": values}

    def collective_folders(self, parts: Parts, weights: list[dict[str, Any]]) -> list[CollectiveFolder]:
        if not self.saves_collectively:
            return []
        return [
            *sharded.model_folders(weights, self._background_group),
            *sharded.optimizer_folders(parts.owners, parts.optimizers, self._background_group),
        ]

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], no_restore: set[torch.Tensor]
    ) -> AbstractContextManager[None]:
        if self.parallelism is None or not self.parallelism.cp_enabled:
            return super().context_parallel(buffers, dims, no_restore)
        return context_parallel.split_sequences(self.mesh["cp"], self.parallelism, buffers, dims, no_restore)

    def close(self) -> None:
        if self._owns_group:
            torch_dist.close_group()
            self._owns_group = False

    def _background_group(self) -> Any:
        """Return a group of all processes for threads, whose collectives do not mix with those of the main thread."""
        if self._background is None and self.runtime.topology.world_size > 1:
            self._background = torch_dist.new_group("gloo")
        return self._background


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise NotImplementedError for an optimizer that cannot train sharded weights.

    The steps of Adafactor and Rprop fail in torch 2.13. LBFGS makes one vector of all weights: its steps fail where
    some are whole, and vectors of a checkpoint are whole.
    """
    if isinstance(optimizer, (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop)):
        raise refuse("shards, optimizer", type(optimizer).__name__)


def _step_one_by_one(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Keep an optimizer from torch's operations on lists of tensors, which take weights of one mesh only."""
    given = [name for name in ("foreach", "fused") if group.get(name)]
    if given:
        warn(
            f"{' and '.join(f'{name}=True' for name in given)} of an optimizer has no effect: some of its weights are "
            "sharded in another way than others, or whole",
        )
    group.update(dict.fromkeys({"foreach", "fused"} & group.keys(), False))
    if "fused" in given:  # else a loss scaler leaves unscaling to the fused step
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _whole(state: dict[str, Any], keeps: bool) -> dict[str, Any]:
    """Return the values whole, on the CPU, where they are kept; what is the same object stays so."""
    made: dict[int, Any] = {}
    for value in state.values():
        if isinstance(value, torch.Tensor) and id(value) not in made:
            full = to_full(value.detach())
            made[id(value)] = full.cpu() if keeps else None
            del full
    if not keeps:
        return {}
    return {plain_name(name): made.get(id(value), value) for name, value in state.items()}
