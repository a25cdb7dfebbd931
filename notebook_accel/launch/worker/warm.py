"""Imports what workers need, once, in a process that they are forked from."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
from typing import Final

from ... import collector
from .. import socket_owners
from . import early

_MODULES: Final = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "tqdm.std",
    "notebook_accel.launch.worker.main",
    "notebook_accel.launch.supervise.socket_folder",
    "notebook_accel.accelerator",
)

_SERVER: Final = os.getpid()


def _hear_interrupts(_: object) -> None:
    """In a child of the server that is no worker: let SIGINT through, which this server has blocked for workers."""
    is_worker = multiprocessing.current_process().name.startswith(early.NAME)
    if sys.platform != "win32" and os.getppid() == _SERVER and not is_worker:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


multiprocessing.util.register_after_fork(_hear_interrupts, _hear_interrupts)
multiprocessing.util.Finalize(  # runs as a fork server ends: where its notebook was killed, nobody else does that
    None, socket_owners.remove_folders_of, args=(socket_owners.find(os.getppid()),), exitpriority=-100
)
with collector.pause():
    for _name in _MODULES:
        importlib.import_module(_name)
gc.freeze()  # else each fork would copy pages that it only counts references in
