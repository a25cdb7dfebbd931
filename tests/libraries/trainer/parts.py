"""Small models, data and arguments for Trainer, and what a case tells of a training."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.libraries import small

Case = Callable[[Path], dict[str, Any]]
TIMES = ("runtime", "per_second", "preparation_time", "total_time", "jit_compilation")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Table(dict[str, Case]):
    """Cases by their names."""

    def add(self, case: Case) -> Case:
        """Add a function under its name."""
        self[case.__name__] = case
        return case


def make_bert(**options: Any) -> BertForSequenceClassification:
    """Return a classifier with dropout."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, max_position_embeddings=16, **{**SIZES, **options})
    )


def make_llama(**options: Any) -> LlamaForCausalLM:
    """Return a language model; its loss takes `num_items_in_batch`."""
    sizes = {**SIZES, "vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return small.make_llama(**{**sizes, **options})


def make_sentences(number: int, length: int = 8) -> list[dict[str, Any]]:
    """Return random words; the third one says the class."""
    draw = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 2, (number,), generator=draw)
    words = torch.randint(10, 60, (number, length), generator=draw)
    words[:, 3] = classes + 2
    return [{"input_ids": line, "labels": label} for line, label in zip(words, classes, strict=True)]


def make_texts(number: int) -> list[dict[str, Any]]:
    """Return texts of one length with some words that do not count, so that batches have unequal numbers of items."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(2, 60, (number, 8), generator=draw)
    labels = words.clone()
    for row, line in enumerate(labels):
        line[: row % 6] = -100
    return [{"input_ids": line, "labels": label} for line, label in zip(words, labels, strict=True)]


def make_lines(number: int) -> list[dict[str, Any]]:
    """Return sentences of several lengths, as lists."""
    return [
        {
            "input_ids": line["input_ids"].tolist()[: 4 + row % 5],
            "attention_mask": [1] * min(8, 4 + row % 5),
            "labels": int(line["labels"]),
        }
        for row, line in enumerate(make_sentences(number))
    ]


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate sentences of several lengths."""
    longest = max(len(row["input_ids"]) for row in rows)
    keys = ("input_ids", "attention_mask")
    padded = {
        key: torch.tensor([[*row[key], *[0] * (longest - len(row[key]))] for row in rows]) for key in keys
    }
    return {**padded, "labels": torch.tensor([row["labels"] for row in rows])}


def make_arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Return arguments of a short training; every step is logged."""
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "use_cpu": True,
            "seed": 1,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_steps": 5,
            "learning_rate": 2e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            **copy.deepcopy(options),  # dicts are changed on the way
        }
    )


def make_trainer(
    folder: Path, model: Any = None, kind: Callable[..., Trainer] = Trainer, **options: Any
) -> Any:
    """Return a trainer.

    Args:
        folder: for its files.
        model: a classifier if None.
        kind: makes the trainer.
        options: for the trainer where it knows them, else for its arguments.
    """
    own = {key: options.pop(key) for key in list(options) if key in OF_TRAINER}
    data = {"train_dataset": make_sentences(43), "eval_dataset": make_sentences(21)}
    if "model_init" not in own:
        own["model"] = model if model is not None else make_bert()
    return kind(args=options.pop("args", None) or make_arguments(folder, **options), **{**data, **own})


OF_TRAINER = {
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "compute_metrics",
    "callbacks",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "model_init",
    "compute_loss_func",
    "preprocess_logits_for_metrics",
    "processing_class",
}


def train(
    folder: Path, model: Any = None, resume: str | bool | None = None, **options: Any
) -> dict[str, Any]:
    """Train and return what is to be the same; see `make_trainer`."""
    trainer = make_trainer(folder, model, **options)
    trainer.train(resume_from_checkpoint=resume)
    return tell(trainer)


def tell(trainer: Trainer) -> dict[str, Any]:
    """Return the log, the weights and the files of a trainer."""
    return {
        "log": without_times(trainer.state.log_history),
        "step": trainer.state.global_step,
        "weights": digest(trainer.model.state_dict()),
        "files": list_files(Path(trainer.args.output_dir)),
        "type": str(trainer.accelerator.distributed_type).split()[0],
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def without_times(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log entries without what differs from run to run."""
    return [
        {k: plain(v) for k, v in entry.items() if not any(word in k for word in TIMES)} for entry in entries
    ]


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.tolist()
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def digest(tensors: dict[str, Any]) -> str:
    """Return a digest of the bytes of tensors and their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found.update(name.encode())
        found.update(whole.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def list_files(folder: Path) -> list[str]:
    """Return the files below a folder when all processes have written theirs."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return small.list_files(folder)


def measure(predicted: Any) -> dict[str, Any]:
    """Count right answers, and samples."""
    right = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"samples": len(right), "right": float(right.mean())}


def numbers() -> list[float]:
    """Return the next random numbers of each source, which shows that both used as many before."""
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


class WithoutMemory(Trainer):
    """Has no memory for large batches, and notes how many samples each batch had.

    Args:
        most: samples for which there is memory.
    """

    def __init__(self, *args: Any, most: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most = most
        self.sizes: list[int] = []

    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        self.sizes.append(len(inputs["input_ids"]))
        if self.sizes[-1] > self.most:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *more)


class Recorder(TrainerCallback):
    """Notes each event with its step."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **more: Any) -> None:
            known = sorted(key for key, value in more.items() if value is not None)
            self.events.append(f"{name} {state.global_step} {state.epoch} {known}")

        return note
