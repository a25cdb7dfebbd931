"""DTensors of parts that lie on another device than the mesh's."""

from __future__ import annotations

import types
from typing import Any

import torch

from notebook_accel import dtensors
from tests.unit.multiprocess import run_ranks


def stay_where_they_are() -> dict[str, Any]:
    """Join parts on the CPU over a mesh of another kind of device, as those of an offloaded model are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    like = distribute_tensor(whole, mesh, [Shard(0)])
    copies = distribute_tensor(whole, mesh, [Replicate()])
    torch.meta = types.SimpleNamespace(device_count=lambda: 2)  # type: ignore[attr-defined] # torch 2.10 asks it
    mesh._device_type = "meta"  # stands for a GPU: what comes there loses its values
    part = dtensors.to_local(like).double()
    joined = dtensors.from_local(part, like)
    sharded = dtensors.shard_like(whole, like)
    found = {
        "joined": (dtensors.to_local(joined).tolist(), joined.shape, joined.dtype),
        "sharded": dtensors.to_local(sharded).tolist(),
        "copied": dtensors.to_local(dtensors.shard_like(whole, copies)).tolist(),
    }
    torch.distributed.destroy_process_group()
    return found


def test_parts_stay_where_they_are() -> None:
    rows = torch.arange(8.0).reshape(4, 2).tolist()
    for rank, found in enumerate(run_ranks(stay_where_they_are)):
        own = rows[2 * rank : 2 * rank + 2]
        assert found == {"joined": (own, (4, 2), torch.float64), "sharded": own, "copied": rows}
