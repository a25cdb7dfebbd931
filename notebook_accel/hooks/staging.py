"""Weights on their way to a GPU, through page-locked memory.

A card reads page-locked memory by itself, while the processor fills the next part of it. What lies in other memory the
driver copies first, with one thread of the processor and in small parts. See "CUDA C++ Best Practices Guide", 10.1.1.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

_PART: Final = 16 << 20  # bytes of a buffer
_SMALL: Final = 1 << 20  # bytes: the driver sends less than that as fast
_NUM_BUFFERS: Final = 2  # one is filled while the other one is sent


def is_for(device: torch.device) -> bool:
    """Return whether weights for a device go through page-locked memory.

    Args:
        device: where they are needed.
    """
    return device.type == "cuda"


class Staging:
    """Sends tensors of the CPU to a device; threads may share it.

    Args:
        device: with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] | None = None  # empty where the system locks no pages
        self._turn = 0
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, which the current stream of the device has when it comes to it.

        Args:
            tensor: of any device and class. Its memory may be freed or changed when this returns.
        """
        if not _is_plain(tensor) or tensor.nbytes < _SMALL or not (buffers := self._get_buffers()):
            return tensor.to(self._device)
        # the first forward may be in inference mode: what is made in it could not be changed outside
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            source, target = (each.detach().view(-1).view(torch.uint8) for each in (tensor, made))
            with self._lock:
                for part, place in zip(source.split(_PART), target.split(_PART), strict=True):
                    buffers[self._turn].send(part, place)
                    self._turn = (self._turn + 1) % len(buffers)
        return made

    def _get_buffers(self) -> list[_Buffer]:
        with self._lock:
            if self._buffers is None:
                try:
                    self._buffers = [_Buffer(self._device) for _ in range(_NUM_BUFFERS)]
                except RuntimeError:  # of CUDA, which knows no better class
                    self._buffers = []
            return self._buffers


class _Buffer:
    """Memory that the device reads by itself.

    Args:
        device: this one.

    Raises:
        RuntimeError: the system locks no more pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: Any = None  # happens when the device has read what is in the memory
        with torch.inference_mode(False):
            self._memory = torch.empty(_PART, dtype=torch.uint8, device="cpu", pin_memory=is_for(device))

    def send(self, part: torch.Tensor, place: torch.Tensor) -> None:
        """Copy some bytes to their place on the device, in its current stream."""
        if self._sent is not None:
            self._sent.synchronize()
        memory = self._memory[: part.nbytes]
        memory.copy_(part)
        place.copy_(memory, non_blocking=True)
        if is_for(self._device):
            self._sent = torch.cuda.current_stream(self._device).record_event()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is its bytes in memory of the CPU, and no more than these."""
    is_dense = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_bytes = not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return is_dense and is_bytes and tensor.device.type == "cpu" and tensor.is_contiguous()
