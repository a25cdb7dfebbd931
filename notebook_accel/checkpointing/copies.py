"""Copies of tensors for a checkpoint that is written while training goes on."""

from __future__ import annotations

from typing import Any

import torch

from . import pickled


class Copies:
    """Copies of tensors on the CPU; tensors that share memory share it in the copy.

    The memory is kept: a second snapshot of the same sizes uses it again.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []

    def reset(self) -> None:
        """Let the next snapshot overwrite the copies made so far, and free memory that the last one did not use."""
        self._spare = {}
        for block in self._used:
            self._spare.setdefault(block.nbytes, []).append(block)
        self._used = []

    def of(self, tree: Any) -> Any:
        """Return a copy of nested dicts, lists and tuples of tensors."""
        shared: dict[tuple[torch.device, int], torch.Tensor] = {}

        def one(path: tuple[Any, ...], tensor: torch.Tensor) -> torch.Tensor:
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            plain = plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            if not plain or tensor.nbytes == 0:
                return tensor.detach().to("cpu", copy=True)
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr())
            if key not in shared:
                shared[key] = self._copy(storage)
            result = torch.empty(0, dtype=tensor.dtype, device="cpu")
            result.set_(shared[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            return result

        return pickled.replace_tensors(tree, one)

    def _copy(self, storage: torch.UntypedStorage) -> torch.Tensor:
        spare = self._spare.get(storage.nbytes())
        block = spare.pop() if spare else torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        # copied as tensors, which torch does in several threads
        block.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        self._used.append(block)
        return block
