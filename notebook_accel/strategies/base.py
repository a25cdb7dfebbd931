"""Strategy: how models and optimizers are made ready to train over the processes of a run."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from .. import checkpointing, gradients
from ..comm.base import Comm
from ..compilation import (
    TorchDynamoPlugin,
    compile_like,
    compile_model,
    find_original,
    is_compiled_module,
    plain_name,
)
from ..handlers import DistributedDataParallelKwargs
from ..precision import Precision, restore_forward
from ..runtime import Runtime

if TYPE_CHECKING:  # imported by those who save
    from ..checkpointing.manifest import Manifest
    from ..checkpointing.parts import CollectiveFolder, Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugins:
    """How a model is spread over the processes: None where neither arguments nor environment say anything.

    Attributes:
        fsdp: how FSDP shards it.
        deepspeed: the `PluginSet` of DeepSpeed.
        parallelism: the sizes of each kind of parallelism.
        ddp: options of DistributedDataParallel.
    """

    fsdp: Any = None
    deepspeed: Any = None
    parallelism: Any = None
    ddp: DistributedDataParallelKwargs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What is prepared together.

    Attributes:
        models: not prepared yet.
        placements: for each model, whether to move it to the device.
        optimizers: raw ones, over parameters of the models.
        schedulers: raw ones; for strategies that step them.
        loaders: not prepared yet; for strategies that must know their batches.
        evaluation: True if the models are not to be trained.
        split_batches: True if loaders split each batch over the processes.
    """

    models: tuple[torch.nn.Module, ...] = ()
    placements: tuple[bool, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    loaders: tuple[Any, ...] = ()
    evaluation: bool = False
    split_batches: bool = False


class Strategy(ABC):
    """Prepares for training, and does what depends on how it prepared.

    The attributes are all that a caller must know of a strategy; nobody asks for its class.

    Attributes:
        runtime: of the process.
        precision: of the accelerator.
    """

    owns_backward: ClassVar[bool] = False
    """The strategy scales the loss and runs the backward pass."""
    shards_weights: ClassVar[bool] = False
    """A process holds only a part of each weight."""
    fills_dummies: ClassVar[bool] = False
    """Stand-ins for optimizers and schedulers of the library's own config are prepared."""
    unpicklable: ClassVar[str] = ""
    """What it trains by, where no pickle can have all of that: a process holds a part, or a library does."""

    runtime: Runtime
    precision: Precision
    options: DistributedDataParallelKwargs | None = None
    """Of DistributedDataParallel, where a model is wrapped in that."""
    mesh: Any = None
    """The device mesh of a run with several kinds of parallelism."""

    @classmethod
    @abstractmethod
    def check(cls, runtime: Runtime, mode: str, plugins: Plugins) -> None:
        """Check that the plugins suit the run, before anything changes.

        Args:
            runtime: of the process.
            mode: the precision.
            plugins: what says how a model is spread over the processes.

        Raises:
            ValueError: the plugins contradict each other or the run.
            NotImplementedError: something that they want cannot be had.
        """

    @classmethod
    @abstractmethod
    def create(cls, runtime: Runtime, precision: Precision, plugins: Plugins) -> Strategy:
        """Return the strategy as the plugins want it.

        Args:
            runtime: of the process.
            precision: of the accelerator.
            plugins: what says how a model is spread over the processes.

        Raises:
            ValueError: the plugins contradict each other or the run.
        """

    @property
    def saves_collectively(self) -> bool:
        """Whether all ranks write models and optimizers, see `collective_folders`; rank 0 writes no others then."""
        return False

    @property
    def wraps_steps(self) -> bool:
        """Whether the strategy has something to do before and after each optimizer step."""
        return False

    @property
    def num_shares(self) -> int:
        """Processes that see different batches."""
        return self.runtime.topology.world_size

    @property
    def norm_comm(self) -> Comm | None:
        """The processes whose whole gradients differ and are clipped alike, None where there are no such."""
        return None

    @property
    def data_comm(self) -> Comm:
        """The collectives of processes that see different batches: one of all that see the same batch."""
        return self.runtime.comm

    @abstractmethod
    def prepare(self, bundle: Bundle) -> Bundle:
        """Return the bundle with its models ready, in order, and its optimizers over their parameters.

        Models and schedulers that belong to an optimizer of the bundle, and were prepared before, may come after them.
        """

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass, with the loss scaled where the precision needs it."""
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        loss.backward(**kwargs)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a raw optimizer train the parameters that replace its own, now or later."""
        return None

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients ready for a step of the raw optimizer."""
        return None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what is due after a step of the raw optimizer."""
        return None

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of the model reduce no gradients."""
        return nullcontext()

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass reduces gradients, though its forward ran under `no_sync`."""
        return nullcontext()

    def joinable(self, model: Any) -> Any:
        """Return what takes part in a `Join` for the model."""
        return model

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the gradients to a total norm. While gradients accumulate, only measure them.

        Args:
            parameters: those whose gradients count.
            max_norm: largest norm of all gradients together.
            norm_type: the p of the p-norm.

        Returns:
            The norm before clipping, a tensor with one element.
        """
        if self.runtime.gradient.sync_gradients:
            return gradients.clip_norm(parameters, max_norm, norm_type, self.norm_comm)
        norm = gradients.measure_norm(parameters, norm_type, self.norm_comm)
        return norm if self.precision.scaler is None else norm / self.precision.scaler.get_scale()

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip every element of the gradients. While gradients accumulate, do nothing.

        Args:
            parameters: those whose gradients are clipped.
            clip_value: the largest absolute value.
        """
        if self.runtime.gradient.sync_gradients:
            gradients.clip_value(parameters, clip_value)

    def compile(self, model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
        """Compile a prepared model.

        Args:
            model: what `prepare` returned.
            plugin: says how; an inactive one leaves the model as it is.
        """
        return compile_model(model, plugin)

    def unwrap(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's model without wrappers; for the arguments see `unwrap`."""
        return unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], no_restore: set[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context in which each process has its part of the sequences, where the strategy splits them.

        Args:
            buffers: tensors with a dimension of sequences; they are cut in place.
            dims: that dimension of each.
            no_restore: buffers that stay cut after the block.
        """
        return nullcontext()

    def collective_folders(self, parts: Parts, weights: list[dict[str, Any]]) -> list[CollectiveFolder]:
        """Return the folders of a checkpoint that all ranks write together.

        Args:
            parts: the prepared objects.
            weights: what `weights` returned for each of the models.
        """
        return []

    def load_collective_folders(self, listed: Manifest, parts: Parts) -> list[Callable[[], None]] | None:
        """Check the folders that all ranks wrote together, and return what loads them.

        By default these are the folders that `FullySharded` writes, which load into whole models too.

        Args:
            listed: the manifest of the checkpoint.
            parts: the objects to load into; models without wrappers.

        Returns:
            What loads models and optimizers; None where the checkpoint has ordinary files.

        Raises:
            CheckpointError: names the file, and the key, that is missing, damaged or does not fit.
        """
        return checkpointing.sharded.plan(listed, parts)

    def weights(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the state of the user's model as it goes into a checkpoint, on all ranks."""
        return self.state_dict(model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of a raw optimizer, on all ranks that write it."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def release(self) -> None:
        """Forget what was prepared."""
        return None

    def close(self) -> None:
        """Close what the strategy opened, at the end of training."""
        return None

    def holds_part(self, model: torch.nn.Module) -> bool:
        """Return True for a model of whose weights this process has only a part: its `state_dict` is a collective."""
        return False

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state of the user's model, under its own names, on all ranks that write it."""
        state: dict[str, Any] = unwrap(model, keep_torch_compile=False).state_dict()
        for name in [name for name in state if "_orig_mod" in name]:  # in place: the dict has metadata too
            state[plain_name(name)] = state.pop(name)
        return state


def unwrap(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> Any:
    """Return the user's model without the wrappers of `prepare`.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: leave the mixed precision forward in place.
        keep_torch_compile: keep the outermost compiled wrapper; wrappers inside it are removed all the same.
        recursive: unwrap submodules too, in place.
    """
    compiled, inner = _peel(model)
    if recursive:
        for parent in list(inner.modules()):
            for name, child in list(parent.named_children()):
                if _is_wrapper(child):
                    setattr(parent, name, child.module)
    if not keep_fp32_wrapper:
        restore_forward(inner)
    if not keep_torch_compile or compiled is None:
        return inner
    if not is_compiled_module(compiled):  # in regions
        compiled = _without_wrappers(compiled)
        if not keep_fp32_wrapper:
            restore_forward(compiled)
        return compiled
    return compiled if find_original(compiled) is inner else compile_like(compiled, inner)


_WRAPPERS: Final = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def _without_wrappers(model: Any) -> Any:
    while _is_wrapper(model):
        model = model.module
    return model


def _is_wrapper(model: Any) -> bool:
    """Return True for what holds the user's model as `module`; without importing the libraries that make such."""
    deepspeed = sys.modules.get("deepspeed")
    engine = getattr(deepspeed, "DeepSpeedEngine", ())
    return isinstance(model, (*_WRAPPERS, engine) if engine else _WRAPPERS)


def _peel(model: Any) -> tuple[Any, Any]:
    """Return the outermost compiled module around the user's model, None without one, and the model itself."""
    compiled: Any = None
    while True:
        source = find_original(model)
        if source is not None:
            compiled = model if compiled is None else compiled
            model = source
        elif _is_wrapper(model):
            model = model.module
        else:
            return compiled, model
