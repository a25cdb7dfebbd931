"""Imports what workers need, once, in a process that they are forked from."""

from __future__ import annotations

import gc
import importlib
from typing import Final

from ... import collector

_MODULES: Final = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "tqdm.std",
    "notebook_accel.launch.worker.main",
    "notebook_accel.launch.supervise.socket_folder",
    "notebook_accel.accelerator",
)

with collector.pause():
    for _name in _MODULES:
        importlib.import_module(_name)
gc.freeze()  # else each fork would copy pages that it only counts references in
