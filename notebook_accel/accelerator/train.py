"""The accelerator's part in a training step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from .. import probes
from ..caller import warn
from ..combinations import refuse
from ..data_loader.base import outer_sampler
from ..data_loader.samplers import sampler_chain
from ..handlers import AutocastKwargs
from ..optimizer import AcceleratedOptimizer
from .arguments import check_steps
from .base import Shared
from .joining import step_together
from .kinds import list_trained, require_handler, require_loss, require_trained


class TrainPart(Shared):
    """Backward, accumulation, clipping and precision."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of a loss.

        The loss is divided by the number of batches per optimizer step, and scaled where the precision needs it.

        Args:
            loss: a tensor with one element.
            kwargs: arguments of the loss's own `backward`; or `learning_rate`, see `lomo_backward`; or
                `scale_wrt_gas`, where False says that the loss is divided already.

        Raises:
            TypeError: the loss is no tensor.
        """
        require_loss(loss)
        learning_rate = kwargs.pop("learning_rate", None)
        steps = self._runtime.gradient.num_steps if kwargs.pop("scale_wrt_gas", True) else 1
        if steps != 1:
            loss = loss / steps
        if learning_rate is None:
            self._strategy.backward(loss, **kwargs)
        else:
            self.lomo_backward(loss, learning_rate)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass with the prepared LOMO optimizers: they change each weight when its gradient is there.

        Args:
            loss: a tensor with one element.
            learning_rate: of this step.

        Raises:
            ImportError: lomo-optim is not installed.
            ValueError: no prepared optimizer is of lomo-optim, the precision is `fp16`, or there are several
                processes: weights would change before gradients are averaged.
        """
        chosen = [optimizer for optimizer in self._optimizers if optimizer.steps_in_backward]
        if not chosen and not probes.is_available("lomo_optim"):
            raise ImportError("LOMO optimizers need a library that is not installed: pip install lomo-optim")
        if not chosen:
            kinds = [type(optimizer.optimizer).__name__ for optimizer in self._optimizers]
            raise ValueError(
                f"learning_rate is for Lomo and AdaLomo of lomo_optim, and the prepared optimizers are {kinds}"
            )
        if self._runtime.topology.world_size > 1:
            raise refuse("lomo, processes", f"{self._runtime.topology.world_size} processes")
        if self._precision.scaler is not None:
            raise refuse("lomo, fp16")
        for optimizer in chosen:
            optimizer.fused_backward(loss, learning_rate)

    @property
    def sync_gradients(self) -> bool:
        """True when the next optimizer step is to happen."""
        return self._runtime.gradient.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._runtime.gradient.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step."""
        return self._runtime.gradient.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        check_steps("gradient_accumulation_steps", gradient_accumulation_steps)
        self._runtime.gradient.num_steps = gradient_accumulation_steps

    def accumulate(
        self, *models: torch.nn.Module | Sequence[torch.nn.Module]
    ) -> AbstractContextManager[None]:
        """Return a context whose block counts as one batch; optimizers and schedulers step in every N-th block only.

        N is `gradient_accumulation_steps`. The last batch of a loader is a step too. Gradients are reduced over the
        processes in the blocks with a step. Blocks are counted for each set of models: those of `accumulate(generator)`
        apart from those of `accumulate(discriminator)`.

        Args:
            models: the prepared models that the block trains; lists of them too.

        Raises:
            TypeError: one of them is no model.
        """
        return _Accumulation(self, list_trained(models))

    @property
    def step(self) -> int:
        """Batches that the latest `accumulate` has counted for its models since the end of a loader.

        Setting it sets the counts of all models.
        """
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._counted, self._counts = step, None, {None: step}

    def _count_batch(self, models: Sequence[torch.nn.Module]) -> bool:
        """Set the flags for the next batch; return True if its gradients stay with the process."""
        flags = self._runtime.gradient
        known = self._models
        self._counted = frozenset([known.index(one) if one in known else id(one) for one in models])
        before = self._counts.get(self._counted, self._counts[None])
        self._set_count(0 if flags.sync_with_dataloader and flags.end_of_dataloader else before + 1)
        flags.sync_gradients = self._step % flags.num_steps == 0
        return not (flags.sync_gradients or flags.sync_each_batch)

    def _set_count(self, count: int) -> None:
        self._step = count
        self._counts = {**self._counts, self._counted: count}  # a new dict: copies have counts of their own

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not reduce gradients over the processes.

        Args:
            model: the prepared model.

        Raises:
            TypeError: it is no model.
        """
        require_trained("no_sync", model)
        return self._strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward pass reduces gradients, though the forward ran under `no_sync`.

        Args:
            model: the prepared model.
        """
        return self._strategy.sync_in_backward(model)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which each process of a context parallel run has its part of each sequence.

        In other runs it does nothing.

        Args:
            buffers: tensors with a dimension of sequences, such as inputs and labels; they are cut in place.
            buffer_seq_dims: that dimension of each.
            no_restore_buffers: those of `buffers` that stay cut after the block.
        """
        return self._strategy.context_parallel(
            buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes without further batches take part in the collectives of the others, until all are done.

        Where gradients accumulate (`gradient_accumulation_steps` as the block begins), all processes step where one of
        them does: with the last batch of one, the others step too, with the batches that they have by then. Models that
        are trained side by side belong in one `accumulate`.

        Args:
            joinables: models that `prepare` wrapped for several processes.
            even_batches: of the prepared loaders within the block; only with False does join have work to do.
        """
        if not self._runtime.topology.world_size > 1:
            yield
            return
        samplers = [] if even_batches is None else self._shards()
        before = [sampler.even_batches for sampler in samplers]
        enable = not (self.dataloader_config.even_batches if even_batches is None else even_batches)
        try:
            for sampler in samplers:
                sampler.even_batches = even_batches
            joining = [self._strategy.joinable(item) for item in joinables]
            for item in joining:
                if not isinstance(item, Joinable):
                    raise TypeError(
                        "join_uneven_inputs takes models that prepare wrapped for several processes, which it does "
                        f"where something is trained, and {type(item).__name__} is none"
                    )
            with (
                self._step_together(joining, enable) as all_joining,
                Join(all_joining, enable=enable, throw_on_early_termination=False),
            ):
                yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value

    def _step_together(self, joining: list[Joinable], enable: bool) -> AbstractContextManager[list[Joinable]]:
        flags = self._runtime.gradient
        if not enable or flags.num_steps == 1:
            return nullcontext(joining)

        def begin_anew() -> None:
            self._set_count(0)

        return step_together(joining, flags, begin_anew)

    def _shards(self) -> list[Any]:
        """Return the samplers that share out batches, one for each prepared loader that has one."""
        chains = [sampler_chain(outer_sampler(loader)) for loader in self._dataloaders]
        found = [next((part for part in chain if hasattr(part, "even_batches")), None) for chain in chains]
        shards = [part for part in found if part is not None]
        if without := len(found) - len(shards):
            warn(
                f"even_batches does not apply to {without} of the {len(found)} prepared loaders: neither to those of "
                "iterable datasets nor to those that dispatch their batches",
            )
        return shards

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale; only `fp16` has one. While gradients accumulate, do nothing.

        Args:
            optimizer: a prepared optimizer or a list of them; by default all.

        Raises:
            RuntimeError: gradients were unscaled already, and a backward pass has added scaled ones.
        """
        scaler = self._precision.scaler
        if scaler is None or not self.sync_gradients:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for item in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            while isinstance(item, AcceleratedOptimizer):
                item = item.optimizer
            scaler.unscale_(item)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Unscale the gradients and clip them to a total norm. While gradients accumulate, only measure them.

        Args:
            parameters: those whose gradients count; under DeepSpeed all of a model.
            max_norm: largest norm of all gradients together.
            norm_type: the p of the p-norm, `inf` for the largest absolute value.

        Returns:
            The norm before clipping, a tensor with one element. While gradients accumulate it is the norm of what this
            process has of them, without the loss scale; under DeepSpeed that of the last step.
        """
        _check_parameters(parameters)
        self.unscale_gradients()
        return self._strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Unscale the gradients and clip every element to [-clip_value, clip_value].

        While gradients accumulate, do nothing.

        Args:
            parameters: those whose gradients are clipped.
            clip_value: the bound.
        """
        _check_parameters(parameters)
        self.unscale_gradients()
        self._strategy.clip_grad_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context in which operations run in the accelerator's precision.

        Args:
            autocast_handler: arguments of `torch.autocast`; by default those of `kwargs_handlers`.

        Raises:
            TypeError: it is of another kind.
        """
        require_handler("autocast", autocast_handler, AutocastKwargs, "to_kwargs")
        return self._precision.autocast(autocast_handler or self._autocast_handler)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if a prepared optimizer left out its last step because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)


class _Accumulation(AbstractContextManager[None]):
    """One batch of gradient accumulation; a class, because a generator takes three times as long for every batch."""

    __slots__ = ("_accelerator", "_flags", "_models", "_outer", "_quiet")

    def __init__(self, accelerator: TrainPart, models: Sequence[torch.nn.Module]) -> None:
        self._accelerator = accelerator
        self._flags = accelerator._runtime.gradient
        self._models = models
        self._quiet: AbstractContextManager[Any] | None = None
        self._outer: bool | None = None

    def __enter__(self) -> None:
        outer = self._flags.sync_gradients if self._flags.num_blocks else None
        if self._accelerator._count_batch(self._models):
            quiet = [self._accelerator.no_sync(model) for model in self._models]
            self._quiet = quiet[0] if len(quiet) == 1 else _together(quiet)
            self._quiet.__enter__()
        self._outer = outer
        self._flags.num_blocks += 1

    def __exit__(self, *raised: Any) -> None:
        try:
            if self._quiet is not None:
                self._quiet.__exit__(*raised)
        finally:
            self._flags.num_blocks -= 1
            if self._outer is not None:
                self._flags.sync_gradients = self._outer


@contextmanager
def _together(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _check_parameters(parameters: object) -> None:
    is_iterable = isinstance(parameters, Iterable) or hasattr(parameters, "__getitem__")
    if isinstance(parameters, (torch.nn.Module, str)) or not is_iterable:
        raise TypeError(
            f"parameters is a {type(parameters).__name__}: the parameters of the model are needed, model.parameters()"
        )
