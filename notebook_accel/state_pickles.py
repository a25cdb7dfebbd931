"""Copies and pickles of states, and what an unpickled state shows in a process that has no run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from . import state_views as views
from .comm.base import Comm
from .comm.single import AbsentComm, SingleComm
from .runtime import Runtime, Settings
from .topology import Topology, pretend

_KEPT: Final = (*views.SHARED, "_mixed_precision", "dynamo_plugin")
"""What a state of a run leaves in a pickle, besides the attributes of the user."""
_RUNTIME: Final = "_runtime_of_pickle"


def list_own(state: Any) -> dict[str, Any]:
    """Return the attributes of a state for copies and pickles: the user's, and what other processes show.

    Args:
        state: of a class of states.
    """
    type(state)._shared_state._fill()  # first: it removes attributes that are from before a reset
    shown = type(state)._list_shared()
    values = {name: value for name, value in vars(state).items() if name not in shown and name != _RUNTIME}
    return values | {name: shown[name] for name in _KEPT if name in shown}


def set_own(state: Any, values: Mapping[str, Any]) -> None:
    """Let a copy of a state share its attributes; where there is no state it has its own.

    Args:
        state: the copy.
        values: what `list_own` returned, or the attributes of a state of Accelerate.
    """
    if (shared := state._shared_state) == {}:
        vars(state).update({str(name): value for name, value in values.items()})
        return
    state.__dict__ = shared
    for name, value in values.items():
        if not hasattr(type(state), name):
            setattr(state, str(name), value)


def find_runtime(state: Any) -> Runtime | None:
    """Return the runtime that a pickle describes, for a process without one; None for a state that is no such copy.

    It has the numbers and choices of the process that made the pickle, and no process group.

    Args:
        state: of a class of states.
    """
    values = vars(state)
    if isinstance(values, views.SharedState) or not set(views.SHARED) <= values.keys():
        return None
    if _RUNTIME not in values:
        device = torch.device(values["device"])
        rank, size = values["process_index"], values["num_processes"]
        comm: Comm = SingleComm(device) if size == 1 else AbsentComm(rank, size, device)
        settings = Settings(
            mixed_precision=values.get("_mixed_precision", "no"),
            debug=values["debug"],
            cpu=values["_cpu"],
            backend=values["backend"],
            dynamo_plugin=values.get("dynamo_plugin"),
            distributed_type=values["distributed_type"].value,
        )
        place = pretend(Topology(), world_size=size, rank=rank, local_rank=values["local_process_index"])
        values[_RUNTIME] = Runtime(topology=place, device=device, comm=comm, settings=settings)
    found: Runtime = values[_RUNTIME]
    return found
