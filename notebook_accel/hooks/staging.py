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
        self._buffers: list[torch.Tensor] = []
        self._sent: list[Any] = []  # for each buffer, what happens when the device has read it
        self._turn = 0
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device, which the current stream of the device has when it comes to it.

        Args:
            tensor: of any device. Its memory may be freed or changed when this returns.
        """
        if tensor.device.type != "cpu" or tensor.nbytes < _SMALL or not tensor.is_contiguous():
            return tensor.to(self._device)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (each.detach().view(-1).view(torch.uint8) for each in (tensor, made))
        with self._lock:
            for part, place in zip(source.split(_PART), target.split(_PART), strict=True):
                self._send_part(part, place)
        return made

    def _send_part(self, part: torch.Tensor, place: torch.Tensor) -> None:
        if len(self._buffers) < _NUM_BUFFERS:
            pinned = self._device.type == "cuda"
            self._buffers.append(torch.empty(_PART, dtype=torch.uint8, device="cpu", pin_memory=pinned))
            self._sent.append(None)
            self._turn = len(self._buffers) - 1
        number = self._turn
        if self._sent[number] is not None:
            self._sent[number].synchronize()
        buffer = self._buffers[number][: part.nbytes]
        buffer.copy_(part)
        place.copy_(buffer, non_blocking=True)
        if is_for(self._device):
            self._sent[number] = torch.cuda.current_stream(self._device).record_event()
        self._turn = (number + 1) % _NUM_BUFFERS
