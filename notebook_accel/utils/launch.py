"""What processes call that a launcher of the user's own starts, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import environ
from ..state import DistributedType
from ..takeover.names import complete_names
from .other import get_int_from_env


class PrepareForLaunch:
    """Calls a function in a process of `torch.multiprocessing.start_processes`, after it told the process its rank.

    Args:
        launcher: the function.
        distributed_type: how the processes work together; NO sets no ranks.
        debug: open a group of gloo first, over the file ACCELERATE_DEBUG_RDV_FILE; `WORLD_SIZE` says of how many.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function.

        Args:
            index: of the process on this node.
            args: for the function.
        """
        values = environ.snapshot()
        if self.debug:
            size = int(values["WORLD_SIZE"])
            store = torch.distributed.FileStore(values["ACCELERATE_DEBUG_RDV_FILE"], size)
            torch.distributed.init_process_group("gloo", rank=index, store=store, world_size=size)
        elif self.distributed_type.value.startswith("MULTI_"):
            first = get_int_from_env(("NPROC",), 1) * get_int_from_env(("NODE_RANK",), 0)
            environ.put({"LOCAL_RANK": str(index), "RANK": str(first + index)})
        environ.put({"FORK_LAUNCHED": "1"})
        self.launcher(*args)


complete_names(__name__)
