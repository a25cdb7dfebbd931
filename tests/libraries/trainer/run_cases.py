"""Runs cases of a module with the Accelerate that is imported, and writes what each found; also a program."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState


def run(case: Any, folder: Path) -> dict[str, Any]:
    """Run a case as if in a process of its own, and return what it found, or its error."""
    before = dict(os.environ)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = {"found": case(folder)}
    except Exception as error:  # whatever it is, the other library is to raise the same
        found = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        print(found["where"], file=sys.stderr)  # what raises in one rank alone leaves the others waiting
    os.environ.clear()
    os.environ.update(before)
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    gc.freeze()  # Trainer collects garbage often, which takes long with so many modules
    return found


def run_modules(folder: str, *names: str) -> None:
    """Run the cases of several modules, and write the results of this rank.

    Args:
        folder: for the files of all cases.
        names: of modules in this folder.
    """
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    importlib.import_module("transformers.trainer_seq2seq")
    gc.freeze()
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    results = {
        name: {
            case: run(make, Path(folder, name, case))
            for case, make in module.CASES.items()
            if alone or case not in getattr(module, "ALONE", ())
        }
        for name, module in modules.items()
    }
    found = {"library": accelerate.__file__, "cases": results}
    Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_modules(*sys.argv[1:])
