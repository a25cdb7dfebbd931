"""Trainer over DeepSpeed, by a JSON file or a dict."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from .parts import (
    Table,
    WithoutMemory,
    make_arguments,
    make_bert,
    make_llama,
    make_texts,
    make_trainer,
    measure,
    numbers,
    tell,
    without_times,
)
from .sharded_cases import read_weights, shard

CASES = Table(
    plain=lambda folder: shard(folder),
    plain_accumulated=lambda folder: shard(folder, gradient_accumulation_steps=2, max_grad_norm=0.3),
    plain_cosine=lambda folder: shard(folder, lr_scheduler_type="cosine"),
)
OFTEN = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "max_steps": 5}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
ADAM = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "zero_force_ds_cpu_optimizer": False,
}
WARMUP = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    }
}
THREE = {
    "stage": 3,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "reduce_bucket_size": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}


def train(
    folder: Path, config: Any, make: Any = make_bert, resume: bool = True, **options: Any
) -> dict[str, Any]:
    """Train by a config, evaluate, save, and resume from the middle."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {**OFTEN, **options}
    trainer = build(folder, config, make, options)
    trainer.train()
    found = {
        **tell(trainer),
        "weights": None,
        "evaluated": without_times([trainer.evaluate()]),
        "engine": type(trainer.model_wrapped).__name__,
        "optimizer": type(trainer.optimizer).__name__,
        "scheduler": type(trainer.lr_scheduler).__name__,
        "config": {
            key: value
            for key, value in trainer.accelerator.state.deepspeed_plugin.deepspeed_config.items()
            if key in ASKED
        },
        "zero3": is_deepspeed_zero3_enabled(),
        "skipped": trainer.accelerator.optimizer_step_was_skipped,
    }
    trainer.save_model(str(folder / "saved"))
    found["saved"] = read_weights(folder / "saved")
    if resume:
        again = build(folder, config, make, options)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        found["again"] = {**tell(again), "weights": None}
    return {**found, "next": numbers()}


def build(folder: Path, config: Any, make: Any, options: dict[str, Any]) -> Any:
    """Return a trainer; its arguments come before the model, which ZeRO 3 shards as it is made."""
    own = {
        key: options[key] for key in ("train_dataset", "eval_dataset", "compute_metrics") if key in options
    }
    rest = {key: value for key, value in options.items() if key not in own}
    arguments = make_arguments(folder, deepspeed=config, **rest)
    return make_trainer(folder, make(), args=arguments, **own)


ASKED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "zero_optimization",
    "bf16",
    "fp16",
)
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage_0": ({**AUTO, "zero_optimization": {"stage": 0}}, {}),
    "stage_1": ({**AUTO, "zero_optimization": {"stage": 1}}, {}),
    "stage_2": (
        {**AUTO, "zero_optimization": {"stage": 2}},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3},
    ),
    "stage_3": ({**AUTO, "zero_optimization": THREE}, {}),
    "stage_3_not_gathered": (
        {**AUTO, "zero_optimization": {**THREE, "stage3_gather_16bit_weights_on_model_save": False}},
        {"resume": False},
    ),
    "optimizer_and_schedule": (
        {**AUTO, **ADAM, **WARMUP, "zero_optimization": {"stage": 1}},
        {"warmup_steps": 2, "weight_decay": 0.01},
    ),
    "schedule_of_ours": (
        {**AUTO, **ADAM, "zero_optimization": {"stage": 2}},
        {"lr_scheduler_type": "cosine"},
    ),
    "bf16": ({**AUTO, "zero_optimization": {"stage": 1}}, {"bf16": True}),
    "best": (
        {**AUTO, "zero_optimization": {"stage": 2}},
        {"load_best_model_at_end": True, "metric_for_best_model": "loss", "compute_metrics": measure},
    ),
    "activations": (
        {**AUTO, "zero_optimization": {"stage": 2}},
        {"gradient_checkpointing": True, "resume": False},
    ),
}
# what Transformers' guide advises; on CPUs offloading moves nothing
OFFLOADED = {"device": "cpu", "pin_memory": True}
GUIDE = {
    **AUTO,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
GUIDE_2 = {
    "stage": 2,
    "offload_optimizer": OFFLOADED,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
GUIDE_3 = {
    **THREE,
    "offload_optimizer": OFFLOADED,
    "offload_param": OFFLOADED,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
GUIDED = {"warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.3, "resume": False}
TABLE |= {
    "guide_2": ({**GUIDE, "zero_optimization": GUIDE_2}, GUIDED),
    "guide_3": ({**GUIDE, "zero_optimization": GUIDE_3}, GUIDED),
}
for name, (config, options) in TABLE.items():
    CASES[name] = lambda folder, config=config, options=options: train(folder, config, **options)


@CASES.add
def by_file(folder: Path) -> dict[str, Any]:
    """A JSON file, for a language model whose loss takes the number of items."""
    path = folder / f"config-{os.environ.get('RANK', '0')}.json"  # another rank reads while this one writes
    path.write_text(json.dumps({**AUTO, **ADAM, **WARMUP, "zero_optimization": THREE}))
    data = {"train_dataset": make_texts(43), "eval_dataset": make_texts(13)}
    return train(folder / "out", str(path), make_llama, gradient_accumulation_steps=2, **data)


def train_again(folder: Path, config: Any, evaluate_first: bool = False, **options: Any) -> dict[str, Any]:
    """Train, evaluate, train again, and go on from a checkpoint, all by one trainer."""
    often = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "learning_rate": 1e-2}
    make = partial(make_bert, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = build(folder, config, make, {**often, **options})
    found = {"evaluated": [without_times([trainer.evaluate()])] if evaluate_first else [], "logs": []}
    for resume in (None, None, str(folder / "checkpoint-1")):
        trainer.optimizer = None  # DeepSpeed needs a new one; without DeepSpeed the old one would go on
        trainer.train(resume_from_checkpoint=resume)
        found["logs"].append(without_times(trainer.state.log_history))
        found["evaluated"].append(without_times([trainer.evaluate()]))
    kinds = [type(part).__name__ for part in (trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler)]
    return {**found, "kinds": kinds, "hooks": len(trainer.model._forward_hooks)}


@CASES.add
def plain_guided(folder: Path) -> dict[str, Any]:
    """Train with the optimizer and the schedule of the guide's config, without DeepSpeed."""

    def rate(step: int) -> float:
        """DeepSpeed's schedule, which begins with the first step of the optimizer."""
        return min(1.0, math.log(max(1, step)) / math.log(GUIDED["warmup_steps"]))

    model = make_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    trainer = make_trainer(folder, model, optimizers=(optimizer, scheduler), max_grad_norm=0.3, **OFTEN)
    trainer.train()
    found = {**tell(trainer), "evaluated": without_times([trainer.evaluate()])}
    trainer.save_model(str(folder / "saved"))
    return {**found, "saved": read_weights(folder / "saved")}


AGAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain_again": (None, {}),
    "again_2": ({**AUTO, "zero_optimization": {"stage": 2}}, {}),
    "again_3": ({**AUTO, "zero_optimization": THREE}, {"evaluate_first": True}),
    "again_by_config": (
        {**AUTO, **ADAM, **WARMUP, "zero_optimization": {"stage": 1}},
        {"warmup_steps": 1, "max_steps": 3},
    ),
}
for name, (config, options) in AGAIN.items():
    CASES[name] = lambda folder, config=config, options=options: train_again(folder, config, **options)


def train_two(folder: Path, *configs: Any) -> dict[str, Any]:
    """Trainings with other values, one after the other, in one process; the first goes on after the second."""
    made, found = [], []
    for stage, (config, rate) in enumerate(zip(configs, (1e-2, 1e-3), strict=True)):
        made.append(build(folder / str(stage), config, make_bert, {"max_steps": 2, "learning_rate": rate}))
        made[-1].train()
    for trainer in made:
        found.append([without_times([trainer.evaluate()]), without_times(trainer.state.log_history)])
    if configs[0] is None:
        made[0].optimizer = None  # the old one would go on
    made[0].train()
    return {"found": found, "second": without_times(made[0].state.log_history)}


CASES["plain_two_trainers"] = lambda folder: train_two(folder, None, None)
CASES["two_trainers"] = lambda folder: train_two(
    folder, *({**AUTO, "zero_optimization": {"stage": stage}} for stage in (2, 1))
)


@CASES.add
def wrong_values(folder: Path) -> dict[str, Any]:
    """A config that contradicts the arguments is refused."""
    config = {
        **AUTO,
        "train_micro_batch_size_per_gpu": 7,
        "gradient_clipping": 3.0,
        "zero_optimization": {"stage": 1},
    }
    return train(folder, config, resume=False)


@CASES.add
def split_sequences(folder: Path) -> dict[str, Any]:
    """Sequences are not split; the trainer says so when it is made."""
    arguments = make_arguments(folder, deepspeed={**AUTO, "zero_optimization": {"stage": 2}})
    arguments.parallelism_config = ParallelismConfig(sp_size=2)
    return {"trainer": str(make_trainer(folder, make_llama(), args=arguments))}


@CASES.add
def config_first(folder: Path) -> dict[str, Any]:
    """`HfDeepSpeedConfig` by itself says what the model is to be."""
    kept = HfDeepSpeedConfig({**AUTO, "zero_optimization": THREE, "train_micro_batch_size_per_gpu": 2})
    seen = [is_deepspeed_zero3_enabled(), kept.is_zero3(), kept.is_zero2(), kept.is_offload()]
    seen += [
        kept.get_value("zero_optimization.stage"),
        kept.is_false("bf16.enabled"),
        kept.is_true("bf16.enabled"),
    ]
    del kept
    return {"seen": seen, "after": is_deepspeed_zero3_enabled()}


@CASES.add
def plugin(folder: Path) -> dict[str, Any]:
    """What a plugin says of a config."""
    made = DeepSpeedPlugin(hf_ds_config={**AUTO, "zero_optimization": THREE})
    return {
        "stage": made.zero_stage,
        "auto": made.is_auto("train_batch_size"),
        "three": made.is_zero3_init_enabled(),
    }


@CASES.add
def smaller_batches(folder: Path) -> dict[str, Any]:
    """Batches shrink until they fit, and the config with them."""
    arguments = make_arguments(
        folder,
        deepspeed={**AUTO, "zero_optimization": {"stage": 1}},
        auto_find_batch_size=True,
        per_device_train_batch_size=3,
    )
    trainer = make_trainer(folder, make_bert(), kind=partial(WithoutMemory, most=2), args=arguments)
    trainer.train()
    return {**tell(trainer), "weights": None, "sizes": trainer.sizes}
