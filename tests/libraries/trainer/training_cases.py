"""How Trainer trains: arguments of the loop, the optimizer and the schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from .parts import (
    Recorder,
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
    plain,
    tell,
    train,
    without_times,
)

CASES = Table()
PLAIN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
    "bf16": {"bf16": True},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2},
    "sync_each_batch": {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    },
    "num_steps_of_the_plugin": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "no_clipping": {"max_grad_norm": 0.0},
    "tight_clipping": {"max_grad_norm": 0.01},
    "cosine_with_restarts": {
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "warmup_steps": 2,
    },
    "reduce_on_plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
    },
    "inverse_sqrt": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "warmup_stable_decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "warmup_steps": 1,
    },
    "sgd": {"optim": "sgd", "weight_decay": 0.1},
    "adafactor": {"optim": "adafactor"},
    "neftune": {"neftune_noise_alpha": 5.0},
    "empty_cache": {"torch_empty_cache_steps": 2},
    "checkpointed_activations": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant_checkpoints": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "ddp_find_unused_parameters": False,
    },
    "tokens_seen": {"include_num_input_tokens_seen": "all"},
    "ddp_options": {
        "ddp_find_unused_parameters": True,
        "ddp_bucket_cap_mb": 1,
        "ddp_broadcast_buffers": False,
    },
    "first_step_logged": {"logging_first_step": True, "logging_steps": 2},
    "deterministic": {"full_determinism": True},
    "eval_first": {"eval_on_start": True, "eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 1},
    "bf16_evaluation": {"bf16_full_eval": True, "eval_strategy": "steps", "eval_steps": 4},
}
for name, options in PLAIN.items():
    CASES[name] = lambda folder, options=options: {**train(folder, **options), "next": numbers()}


@CASES.add
def num_items_in_batch(folder: Path) -> dict[str, Any]:
    """The loss of a language model is divided by the words that count, of all processes or of each."""
    options = {"train_dataset": make_texts(37), "gradient_accumulation_steps": 3, "max_steps": 4}
    return {
        str(average): train(
            folder / str(average), make_llama(), average_tokens_across_devices=average, **options
        )
        for average in (True, False)
    }


@CASES.add
def own_loss(folder: Path) -> dict[str, Any]:
    """A loss of the user's gets the number of items."""
    seen = []

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        seen.append(plain(num_items_in_batch))
        wrong = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return wrong / num_items_in_batch

    found = train(folder, compute_loss_func=loss, gradient_accumulation_steps=2)
    return {**found, "seen": seen}


@CASES.add
def compiled(folder: Path) -> dict[str, Any]:
    """A compiled model trains, evaluates and is saved under the names of its own parameters."""
    trainer = make_trainer(
        folder,
        make_bert(num_hidden_layers=1),
        torch_compile=True,
        torch_compile_backend="eager",
        max_steps=2,
        save_steps=2,
        save_strategy="steps",
    )
    trainer.train()
    return {**tell(trainer), "evaluated": without_times([trainer.evaluate()])}


@CASES.add
def callbacks(folder: Path) -> dict[str, Any]:
    """Events come in the same order with the same objects."""
    recorder = Recorder()
    found = train(
        folder,
        callbacks=[recorder],
        max_steps=3,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=3,
    )
    return {**found, "events": recorder.events}


@CASES.add
def stopped_early(folder: Path) -> dict[str, Any]:
    """Early stopping ends the training, and the best model is loaded."""
    trainer = make_trainer(
        folder,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        compute_metrics=measure,
        metric_for_best_model="right",
    )
    trainer.train()
    best = trainer.state.best_model_checkpoint
    return {**tell(trainer), "best": best and Path(best).name}


class StopAt(TrainerCallback):
    """Ends the training in the middle of an epoch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == 2
        control.should_save = state.global_step == 2


def resume_in_an_epoch(folder: Path, **options: Any) -> dict[str, Any]:
    """Train with and without a break in the middle of the second epoch."""
    often = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4, **options}
    whole = train(folder, **often)
    again = train(folder, resume=str(folder / "checkpoint-4"), **often)
    assert "ignore_data_skip" in options or whole["weights"] == again["weights"]
    return {"whole": whole, "again": again, "next": numbers()}


@CASES.add
def resumed(folder: Path) -> dict[str, Any]:
    return resume_in_an_epoch(folder, per_device_train_batch_size=6, gradient_accumulation_steps=2)


@CASES.add
def resumed_without_skipping(folder: Path) -> dict[str, Any]:
    return resume_in_an_epoch(folder, per_device_train_batch_size=7, ignore_data_skip=True)


@CASES.add
def resumed_with_workers(folder: Path) -> dict[str, Any]:
    return resume_in_an_epoch(folder, per_device_train_batch_size=7, dataloader_num_workers=1)


@CASES.add
def resumed_from_the_last(folder: Path) -> dict[str, Any]:
    """`resume_from_checkpoint=True` takes the last checkpoint; the callback ended the first part."""
    first = train(folder, callbacks=[StopAt()])
    return {"first": first, "rest": train(folder, resume=True)}


@CASES.add
def trained_twice(folder: Path) -> dict[str, Any]:
    """Several `train()` of one trainer, and of a second one after it."""
    trainer = make_trainer(folder, max_steps=2)
    parts = []
    for _ in range(2):
        trainer.train()
        parts.append(tell(trainer))
    return {
        "parts": parts,
        "other": train(folder, max_steps=2),
        "evaluated": without_times([trainer.evaluate()]),
    }


@CASES.add
def evaluated_first(folder: Path) -> dict[str, Any]:
    """Evaluate and predict before and after training."""
    trainer = make_trainer(folder, compute_metrics=measure)
    before = without_times([trainer.evaluate()])
    trainer.train()
    predicted = trainer.predict(make_sentences(13))
    return {
        "before": before,
        **tell(trainer),
        "after": without_times([trainer.evaluate()]),
        "predicted": [
            plain(predicted.predictions),
            plain(predicted.label_ids),
            *without_times([predicted.metrics]),
        ],
    }


@CASES.add
def smaller_batches(folder: Path) -> dict[str, Any]:
    """`auto_find_batch_size` tries again where memory is said to be full."""
    trainer = make_trainer(
        folder,
        kind=partial(WithoutMemory, most=4),
        auto_find_batch_size=True,
        per_device_train_batch_size=5,
    )
    trainer.train()
    return {**tell(trainer), "sizes": trainer.sizes}


@CASES.add
def given_optimizer(folder: Path) -> dict[str, Any]:
    """An optimizer and a scheduler of the user's."""
    model = make_bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found = train(folder, model, optimizers=(optimizer, scheduler))
    other = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
    return {**found, "by class": train(folder, **other)}


@CASES.add
def made_anew(folder: Path) -> dict[str, Any]:
    """A model is made for each training."""

    def make() -> Any:
        set_seed(7)
        return make_bert()

    trainer = make_trainer(folder, model_init=make, max_steps=2)
    trainer.train()
    first = tell(trainer)
    trainer.train()
    return {"first": first, "second": tell(trainer)}


@CASES.add
def searched(folder: Path) -> dict[str, Any]:
    """A search over hyperparameters with optuna."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trainer = make_trainer(
        folder, model_init=lambda: make_bert(), max_steps=3, eval_strategy="steps", eval_steps=2
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
            "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
        },
        backend="optuna",
        n_trials=3,
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    found = [best.run_id, best.objective, best.hyperparameters] if best is not None else None
    return {"best": found, "log": without_times(trainer.state.log_history), "files": list_files(folder)}


@CASES.add
def attributes(folder: Path) -> dict[str, Any]:
    """What callbacks and subclasses read of the accelerator."""
    trainer = make_trainer(folder, gradient_accumulation_steps=2)
    trainer.train()
    accelerator = trainer.accelerator
    return {
        "unwrapped": type(accelerator.unwrap_model(trainer.model_wrapped)).__name__,
        "same": accelerator.unwrap_model(trainer.model_wrapped) is trainer.model,
        "sync": accelerator.sync_gradients,
        "num_steps": accelerator.gradient_accumulation_steps,
        "each": accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False),
        "skipped": accelerator.optimizer_step_was_skipped,
        "scaler": accelerator.scaler is None,
        "device": trainer.args.device.type,
        "world": [trainer.args.world_size, trainer.args.process_index, trainer.args.local_process_index],
        "mode": str(trainer.args.parallel_mode),
        "main": trainer.is_world_process_zero(),
        "optimizer": type(trainer.optimizer).__name__,
        "scheduler": type(trainer.lr_scheduler).__name__,
        "loaders": [
            type(each).__name__ for each in (trainer.get_train_dataloader(), trainer.get_eval_dataloader())
        ],
        "dtype": str(accelerator.mixed_precision),
        "callbacks": [type(each).__name__ for each in trainer.callback_handler.callbacks],
        "models": [len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)],
    }


ALONE = {
    "label_smoothing",
    "tight_clipping",
    "cosine_with_restarts",
    "inverse_sqrt",
    "warmup_stable_decay",
    "sgd",
    "adafactor",
    "first_step_logged",
    "deterministic",
    "bf16_evaluation",
    "evaluated_first",
    "made_anew",
}
"""What has nothing to do with the number of processes is tried on one, to save time."""
