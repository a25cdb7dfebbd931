"""Trainer and a loop over models that Transformers has split as it loaded them, by tensor parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from torch.optim import SGD
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from .parts import Table, make_llama, make_texts
from .sharded_cases import shard

CASES = Table()
EVALUATED = [
    {**text, "labels": text["input_ids"]} for text in make_texts(16)
]  # losses of batches weigh the same
DATA = {"train_dataset": make_texts(43), "eval_dataset": EVALUATED}
# two processes with whole models take by turns halves of the batches that split ones get
SPLIT: dict[str, Any] = {"tp_plan": "auto"}
BATCHES = {"split": 4, "whole": 2}


def load(folder: Path, name: str) -> LlamaForCausalLM:
    """Return the model that the cases start from."""
    base, state = folder.parent / "base", PartialState()
    if state.is_main_process and not base.exists():
        make_llama().save_pretrained(base)
    state.wait_for_everyone()
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(base, **(SPLIT if name == "split" else {}))
    return model


def train(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """Train by Trainer, which cannot go on with a model that was split as it was loaded."""
    options |= {"save_only_model": True, "resume": False}
    sizes = {f"per_device_{kind}_batch_size": BATCHES[name] for kind in ("train", "eval")}
    return shard(folder, lambda: load(folder, name), **DATA, **sizes, **options)


for each in BATCHES:
    CASES[each] = lambda folder, each=each: train(folder, each)
    CASES[f"{each}_accumulated"] = lambda folder, each=each: train(
        folder, each, gradient_accumulation_steps=2
    )


@CASES.add
def own_loop(folder: Path) -> dict[str, Any]:
    """A loop of the user's."""
    found = {}
    for name, size in BATCHES.items():
        AcceleratorState._reset_state(True)
        model = load(folder, name)
        config = {"parallelism_config": ParallelismConfig(tp_size=2)} if name == "split" else {}
        accelerator = Accelerator(**config)
        optimizer = SGD(model.parameters(), lr=0.1)
        loader = DataLoader([text["input_ids"] for text in make_texts(16)], batch_size=size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        rows = []
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rows.append([float(accelerator.reduce(loss.detach(), "mean")), float(norm), batch[:, 0].tolist()])
        found[name] = {"rows": rows, "kind": type(model).__name__}
    return found
