"""Settings of Python and torch, and random states, that workers take over from the notebook."""

from __future__ import annotations

import contextlib
import logging
import operator
import random
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

_BACKENDS: Final = (
    "cudnn.benchmark",
    "cudnn.deterministic",
    *(f"{part}fp32_precision" for part in ("", "cuda.matmul.", "cudnn.conv.", "cudnn.rnn.")),
    *(f"mkldnn.{part}.fp32_precision" for part in ("matmul", "conv", "rnn")),
)
"""Attributes below `torch.backends`; torch before 2.9 lacks some."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings and random states of the notebook's process that workers have too.

    Attributes:
        device: torch's default device; None where none was set.
        deterministic: torch's deterministic debug mode, 0 to 2.
        matmul_precision: of float32; None where it was set by `backends` too, and torch cannot tell.
        log_levels: of each logger that has one, by name; the root logger's is "".
        log_handlers: handlers of the root logger that write to the cell, as `logging.basicConfig` makes them: the
            name of the stream, the level and the formatter.
        log_disabled: the level of `logging.disable`.
        warning_filters: as in `warnings.filters`, with categories by module and name.
        seed: of torch's generators on devices.
    """

    dtype: torch.dtype
    device: str | None
    has_grad: bool
    deterministic: int
    matmul_precision: str | None
    backends: dict[str, Any]
    recursion_limit: int
    log_levels: dict[str, int]
    log_handlers: list[tuple[str, int, logging.Formatter]]
    log_disabled: int
    warning_filters: list[tuple[Any, ...]]
    python_random: Any
    numpy_random: Any
    torch_random: bytes
    seed: int

    @classmethod
    def capture(cls) -> Settings:
        """Read this process's settings; default device and gradient mode are those of this thread."""
        filters = _list_warning_filters()
        context = getattr(
            torch._GLOBAL_DEVICE_CONTEXT, "device_context", None
        )  # asking torch would start the device
        return cls(
            dtype=torch.get_default_dtype(),
            device=str(context.device) if context is not None else None,
            has_grad=torch.is_grad_enabled(),
            deterministic=torch.get_deterministic_debug_mode(),
            matmul_precision=_read_matmul_precision(),
            backends={name: _read_backend(name) for name in _BACKENDS},
            recursion_limit=sys.getrecursionlimit(),
            log_levels=_list_log_levels(),
            log_handlers=_list_log_handlers(),
            log_disabled=logging.root.manager.disable,
            warning_filters=filters,
            python_random=random.getstate(),
            numpy_random=np.random.get_state(),
            torch_random=torch.get_rng_state().numpy().tobytes(),
            seed=torch.initial_seed(),
        )

    def restore(self, *, forked: bool) -> None:
        """Give this process the settings. Generators of devices start with the seed that the kernel gave torch.

        A forked process has all but the state of `random`, and the locks of torch's and NumPy's generators as they
        were at the fork: another thread of the kernel may have held one.
        """
        random.setstate(self.python_random)
        if forked:
            return
        self._restore_torch()
        sys.setrecursionlimit(self.recursion_limit)
        self._restore_logging()
        self._restore_warnings()
        np.random.set_state(self.numpy_random)

    def _restore_torch(self) -> None:
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.has_grad)
        if self.deterministic != torch.get_deterministic_debug_mode():
            # imports torch's compiler, for a second
            torch.use_deterministic_algorithms(self.deterministic > 0, warn_only=self.deterministic == 1)
        if self.matmul_precision not in (None, _read_matmul_precision()):
            torch.set_float32_matmul_precision(str(self.matmul_precision))
        for name, value in self.backends.items():
            if value is not None and value != _read_backend(name):
                owner, _, attribute = f"backends.{name}".rpartition(".")
                setattr(operator.attrgetter(owner)(torch), attribute, value)
        if self.seed != torch.initial_seed():
            torch.manual_seed(self.seed)  # of devices too, when they start
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_random), dtype=torch.uint8))
        if self.device is not None:
            torch.set_default_device(self.device)

    def _restore_logging(self) -> None:
        for name, level in self.log_levels.items():
            logger = logging.getLogger(name)
            if logger.level != level:  # to set it empties the caches of all loggers
                logger.setLevel(level)
        logging.disable(self.log_disabled)
        root = logging.getLogger()
        for stream, level, formatter in [] if root.handlers else self.log_handlers:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(level)
            handler.setFormatter(formatter)
            root.addHandler(handler)

    def _restore_warnings(self) -> None:
        warnings.resetwarnings()
        for action, message, (module, name), where, line in self.warning_filters:
            with contextlib.suppress(
                KeyError, AttributeError
            ):  # it is not imported here, or made in a function
                category = operator.attrgetter(name)(sys.modules[module])
                warnings.filterwarnings(action, message, category, where, line, append=True)


def _read_matmul_precision() -> str | None:
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # torch 2.9 has another name for it
        return torch.get_float32_matmul_precision()
    return None


def _read_backend(name: str) -> Any:
    try:
        return operator.attrgetter(name)(torch.backends)
    except (AttributeError, RuntimeError):  # an older torch, or one setting was set in two ways
        return None


def _list_log_levels() -> dict[str, int]:
    loggers = {"": logging.getLogger(), **logging.root.manager.loggerDict}
    return {
        name: int(one.level) for name, one in loggers.items() if isinstance(one, logging.Logger) and one.level
    }


def _list_log_handlers() -> list[tuple[str, int, logging.Formatter]]:
    streams = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
    found = [one for one in logging.getLogger().handlers if type(one) is logging.StreamHandler]
    return [
        (streams[id(one.stream)], one.level, one.formatter)
        for one in found
        if id(one.stream) in streams and type(one.formatter) is logging.Formatter
    ]


def _list_warning_filters() -> list[tuple[Any, ...]]:
    """Return `warnings.filters` as values that any process can read; a category of a cell is left out."""
    filters: list[Any] = list(warnings.filters)
    return [
        (action, _pattern(message), (category.__module__, category.__qualname__), _pattern(module), line)
        for action, message, categories, module, line in filters
        for category in (categories if isinstance(categories, tuple) else (categories,))
        if category.__module__ != "__main__"
    ]


def _pattern(text: str | re.Pattern[str] | None) -> str:
    return text.pattern if isinstance(text, re.Pattern) else text or ""
