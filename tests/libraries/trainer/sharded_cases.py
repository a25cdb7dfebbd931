"""Trainer over models that are spread over processes: by FSDP, meshes and tensor parallelism."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import ParallelismConfig
from safetensors.torch import load_file

from .parts import (
    Table,
    WithoutMemory,
    list_files,
    make_bert,
    make_llama,
    make_sentences,
    make_texts,
    make_trainer,
    measure,
    numbers,
    tell,
    without_times,
)

CASES = Table()
OFTEN = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 5}


def wrap(layer: str = "BertLayer", **options: Any) -> dict[str, Any]:
    """Return `fsdp_config` that shards each layer."""
    return {"transformer_layer_cls_to_wrap": [layer], **options}


def read_weights(folder: Path) -> dict[str, Any]:
    """Return names and sums of the tensors that a folder has as safetensors."""
    list_files(folder)  # waits until rank 0 has written them
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return {
        name: [list(tensor.shape), str(tensor.dtype), float(tensor.double().sum())]
        for name, tensor in tensors.items()
    }


def shard(folder: Path, make: Any = make_bert, resume: bool = True, **options: Any) -> dict[str, Any]:
    """Train in a sharded way, evaluate, save, and resume from the middle."""
    options = {**OFTEN, **options}
    trainer = make_trainer(folder, make(), **options)
    trainer.train()
    found = tell(trainer)
    found["evaluated"] = without_times([trainer.evaluate()])
    trainer.save_model(str(folder / "saved"))
    found["saved"] = read_weights(folder / "saved")
    found["parts"] = sorted({type(part).__name__ for part in trainer.model_wrapped.modules()})
    found["norms"] = [entry["grad_norm"] for entry in found["log"] if "grad_norm" in entry]
    if resume:
        again = make_trainer(folder, make(), **options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        found["again"] = tell(again)
    found["next"] = numbers()
    found["files"] = list_files(folder)
    return found


FSDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_accumulated": {"gradient_accumulation_steps": 2},
    "plain_bf16": {"bf16": True},
    "fsdp": {"fsdp": True, "fsdp_config": wrap()},
    "fsdp_by_words": {"fsdp": "full_shard auto_wrap", "fsdp_config": wrap(), "resume": False},
    "fsdp_of_shards": {"fsdp": True, "fsdp_config": wrap(state_dict_type="SHARDED_STATE_DICT")},
    "fsdp_bf16": {"fsdp": True, "fsdp_config": wrap(), "bf16": True},
    "fsdp_by_size": {
        "fsdp": True,
        "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500},
        "resume": False,
    },
    "fsdp_whole": {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}, "resume": False},
    "fsdp_gradients_only": {"fsdp": True, "fsdp_config": wrap(reshard_after_forward=False), "resume": False},
    "fsdp_checkpoints": {"fsdp": True, "fsdp_config": wrap(activation_checkpointing=True)},
    "fsdp_accumulated": {"fsdp": True, "fsdp_config": wrap(), "gradient_accumulation_steps": 2},
    "fsdp_best": {
        "fsdp": True,
        "fsdp_config": wrap(),
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "compute_metrics": measure,
    },
    "fsdp_best_of_shards": {
        "fsdp": True,
        "fsdp_config": wrap(state_dict_type="SHARDED_STATE_DICT"),
        "load_best_model_at_end": True,
    },
    "fsdp_model_only": {"fsdp": True, "fsdp_config": wrap(), "save_only_model": True, "resume": False},
    "fsdp_one": {"fsdp": True, "fsdp_config": wrap(version=1)},
    "fsdp_efficient": {"fsdp": True, "fsdp_config": wrap(cpu_ram_efficient_loading=True)},
}
for name, options in FSDP.items():
    CASES[name] = lambda folder, options=options: shard(folder, **options)


@CASES.add
def fsdp_language_model(folder: Path) -> dict[str, Any]:
    """A language model with tied weights, whose loss takes the number of items."""
    options = {"fsdp": True, "fsdp_config": wrap("LlamaDecoderLayer"), "gradient_accumulation_steps": 2}
    data = {"train_dataset": make_texts(43), "eval_dataset": make_texts(13)}
    return shard(folder, lambda: make_llama(tie_word_embeddings=True), **options, **data)


@CASES.add
def fsdp_by_variables(folder: Path) -> dict[str, Any]:
    """A launcher has set what its config says."""
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
    return shard(folder)


@CASES.add
def fsdp_smaller_batches(folder: Path) -> dict[str, Any]:
    """A model that is sharded already is sharded anew for smaller batches."""
    options = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 3,
        "fsdp": True,
        "fsdp_config": wrap(),
    }
    trainer = make_trainer(folder, kind=partial(WithoutMemory, most=2), **options)
    trainer.train()
    return {**tell(trainer), "sizes": trainer.sizes}


@CASES.add
def fsdp_twice(folder: Path) -> dict[str, Any]:
    """Two trainings of one trainer."""
    trainer = make_trainer(folder, fsdp=True, fsdp_config=wrap(), max_steps=2)
    trainer.train()
    first = tell(trainer)
    trainer.train()
    return {"first": first, "second": tell(trainer)}


@CASES.add
def fsdp_evaluated(folder: Path) -> dict[str, Any]:
    """Evaluation without training prepares the model too."""
    trainer = make_trainer(folder, fsdp=True, fsdp_config=wrap(), compute_metrics=measure)
    evaluated = without_times([trainer.evaluate()])
    return {"evaluated": evaluated, "predicted": trainer.predict(make_sentences(5)).predictions.tolist()}


def parallel(folder: Path, **sizes: Any) -> dict[str, Any]:
    """Train a language model over a mesh."""
    data = {"train_dataset": make_texts(43), "eval_dataset": make_texts(13)}
    more = {"parallelism_config": ParallelismConfig(**sizes), "resume": False, "eval_strategy": "no"}
    return shard(
        folder, make_llama, **data, **more, **({} if "dp_replicate_size" in sizes else FSDP_OF_LLAMA)
    )


FSDP_OF_LLAMA = {"fsdp": True, "fsdp_config": wrap("LlamaDecoderLayer")}


@CASES.add
def sharded_by_mesh(folder: Path) -> dict[str, Any]:
    return parallel(folder, dp_shard_size=2)


@CASES.add
def replicated_by_mesh(folder: Path) -> dict[str, Any]:
    return parallel(folder, dp_replicate_size=2)
