"""Local SGD: each process trains alone for some steps, then all processes average their parameters.

Zhang, De Sa, Mitliagkas, Ré: Parallel SGD: When does averaging help? (2016), arXiv:1606.07365.
Stich: Local SGD converges fast and communicates little (2019), arXiv:1805.09767.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

from .accelerator import Accelerator
from .accelerator.arguments import check_steps
from .accelerator.kinds import require_model
from .combinations import refuse
from .takeover.names import complete_names


class LocalSGD:
    """Context manager in which backward passes reduce no gradients, and `step` averages the parameters.

    The end of the block averages them once more, unless an exception ends it. Buffers and the states of optimizers
    are not averaged.

    Args:
        accelerator: the one that prepared the model.
        model: a prepared model.
        local_sgd_steps: number of calls of `step` from one average to the next.
        enabled: False turns it off; it is also off in a run of one process.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: `local_sgd_steps` is less than 1.
        NotImplementedError: the accelerator's strategy does not keep the whole model in every process.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if not hasattr(accelerator, "_strategy"):
            raise TypeError(f"LocalSGD takes an Accelerator, not {accelerator!r:.80}")
        require_model("LocalSGD", model)
        check_steps("local_sgd_steps", local_sgd_steps)
        strategy = accelerator._strategy
        if strategy.shards_weights or strategy.owns_backward:
            raise refuse("local sgd, no whole model", type(strategy).__name__)
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self._alone = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._alone.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._alone:
            # after an error the other processes may never take part in an average
            if self.enabled and kind is None:
                self._average()

    def step(self) -> None:
        """Count an optimizer step, and average the parameters after every `local_sgd_steps` of them.

        Every process must call it the same number of times.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        own = [parameter.data for parameter in self.model.parameters()]
        for tensor, mean in zip(own, self.accelerator.reduce(own, reduction="mean"), strict=True):
            tensor.copy_(mean)


complete_names(__name__)
