"""In a worker: reads torch's flight recorder, which knows of collectives that have not ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...events import RecordedCollective

_READERS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_MOST: Final = 3


def read_recorder(since_ns: int = 0) -> list[RecordedCollective]:
    """Return the oldest collectives of this process that are under way; if there are none, the last one recorded.

    torch has a recorder for NCCL and one for other backends. A worker on a GPU uses both, since its objects go by gloo.

    The format is that of torch 2.9 to 2.13:
    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html

    Args:
        since_ns: leave out what began before that time, in nanoseconds since the epoch. A collective whose group was
            replaced never ends.

    Returns:
        Collectives, oldest first; at most 3. Empty where torch recorded nothing: without torch.distributed, with a
        backend that does not record, or where TORCH_FR_BUFFER_SIZE is 0.
    """
    torch_c = sys.modules.get("torch._C._distributed_c10d")
    readers = [read for name in _READERS if (read := getattr(torch_c, name, None)) is not None]
    entries = [entry for read in readers for entry in json.loads(read()).get("entries", [])]
    entries = [entry for entry in entries if entry["time_created_ns"] >= since_ns]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    under_way = [entry for entry in entries if not _is_over(entry)]
    return [_read_entry(entry) for entry in under_way[:_MOST] or entries[-1:]]


def name_wait(recorded: Sequence[RecordedCollective]) -> str:
    """Return the name of the oldest collective that is under way, as Python calls it; empty where none is.

    A collective of NCCL returns at once. The thread waits later, where it reads a result, in no frame of a collective.

    Args:
        recorded: what `read_recorder` returned.
    """
    return next((entry.name.rpartition(":")[2] for entry in recorded if not entry.is_over), "")


def _is_over(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _read_entry(entry: Mapping[str, Any]) -> RecordedCollective:
    group, description = entry["process_group"]
    return RecordedCollective(
        name=entry["profiling_name"],
        number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        group=description if description not in ("", "undefined") else group,
        inputs=_describe_tensors(entry["input_sizes"], entry["input_dtypes"]),
        is_over=_is_over(entry),
    )


def _describe_tensors(sizes: list[list[int]], dtypes: list[str]) -> str:
    """Return shapes and types of tensors as text: `8x3 Float, 5 Long`."""
    return ", ".join(
        f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"
        for shape, dtype in zip(sizes, dtypes, strict=False)
    )
