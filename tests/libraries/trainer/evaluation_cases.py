"""How Trainer evaluates and predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from .parts import (
    Table,
    make_bert,
    make_lines,
    make_sentences,
    make_trainer,
    measure,
    pad,
    plain,
    tell,
    without_times,
)

CASES = Table()


def summarize(value: Any) -> Any:
    """Return shapes and values of predictions."""
    if isinstance(value, numpy.ndarray):
        return {"shape": value.shape, "dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {key: summarize(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(summarize(part) for part in value)]
    return plain(value)


def evaluate(folder: Path, model: Any = None, number: int = 13, **options: Any) -> dict[str, Any]:
    """Evaluate and predict without training."""
    kept: list[Any] = []

    def keep(predicted: Any, **named: Any) -> dict[str, Any]:
        kept.append([summarize(predicted.predictions), summarize(predicted.label_ids)])
        kept.append([summarize(predicted.inputs), summarize(predicted.losses), sorted(named.items())])
        return {"count": len(kept)}

    data = {"eval_dataset": make_sentences(number), "compute_metrics": keep}
    trainer = make_trainer(folder, model, **{**data, **options})
    evaluated = without_times([trainer.evaluate()])
    predicted = trainer.predict(trainer.eval_dataset)
    shown = [
        summarize(predicted.predictions),
        summarize(predicted.label_ids),
        *without_times([predicted.metrics]),
    ]
    return {"evaluated": evaluated, "predicted": shown, "kept": kept}


class Nested(nn.Module):
    """Returns a tuple, a dict and logits of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 3)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **more: Any
    ) -> dict[str, Any]:
        words = self.embedding(input_ids)
        logits = words.mean(1)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {
            "loss": loss,
            "logits": logits,
            "words": words,
            "parts": (logits + 1, {"lengths": words.sum(-1)}),
        }


LONG = {"data_collator": pad, "eval_dataset": make_lines(13), "remove_unused_columns": False}
TABLE: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "one_sample": {"number": 1},
    "fewer_than_processes": {"number": 3, "per_device_eval_batch_size": 2},
    "large_batches": {"per_device_eval_batch_size": 32},
    "accumulated": {"eval_accumulation_steps": 1},
    "accumulated_by_two": {"eval_accumulation_steps": 2, "number": 21},
    "not_concatenated": {"eval_do_concat_batches": False},
    "not_concatenated_accumulated": {"eval_do_concat_batches": False, "eval_accumulation_steps": 2},
    "inputs_and_losses": {"include_for_metrics": ["inputs", "loss"]},
    "inputs_and_losses_accumulated": {
        "include_for_metrics": ["inputs", "loss"],
        "eval_accumulation_steps": 1,
    },
    "objects": {"eval_use_gather_object": True},
    "loss_only": {"prediction_loss_only": True},
    "bf16": {"bf16": True},
    "all_bf16": {"bf16_full_eval": True},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "uneven_ends": {"accelerator_config": {"even_batches": False}, "number": 16},
    "workers": {"dataloader_num_workers": 1},
    "processed_logits": {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
    "label_smoothing": {"label_smoothing_factor": 0.2},
}
for name, options in TABLE.items():
    CASES[name] = lambda folder, options=options: evaluate(folder, **options)


@CASES.add
def nested(folder: Path) -> dict[str, Any]:
    """Predictions are nested, and their lengths differ from batch to batch and from process to process."""
    return {
        "whole": evaluate(folder, Nested(), **LONG),
        "accumulated": evaluate(folder, Nested(), eval_accumulation_steps=1, **LONG),
        "parts": evaluate(folder, Nested(), eval_do_concat_batches=False, **LONG),
        "with inputs": evaluate(folder, Nested(), include_for_metrics=["inputs", "loss"], **LONG),
    }


class Named(nn.Module):
    """Returns an output class of Transformers with hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 2)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        words = self.embedding(input_ids)
        loss = nn.functional.cross_entropy(words.mean(1), labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=words.mean(1), hidden_states=(words, words + 1))


@CASES.add
def named_outputs(folder: Path) -> dict[str, Any]:
    return evaluate(folder, Named())


@CASES.add
def without_labels(folder: Path) -> dict[str, Any]:
    """Prediction of data without labels has no loss."""
    rows = [{"input_ids": row["input_ids"]} for row in make_sentences(7)]
    predicted = make_trainer(folder).predict(rows)
    return {
        "predicted": summarize(predicted.predictions),
        "labels": predicted.label_ids,
        **without_times([predicted.metrics])[0],
    }


@CASES.add
def hidden_states(folder: Path) -> dict[str, Any]:
    """A model gives hidden states and attention; some are left out."""
    trainer = make_trainer(folder, make_bert(output_hidden_states=True, output_attentions=True))
    rows = make_sentences(5)
    return {
        "all": summarize(trainer.predict(rows).predictions),
        "fewer": summarize(trainer.predict(rows, ignore_keys=["hidden_states"]).predictions),
    }


@CASES.add
def metrics_in_batches(folder: Path) -> dict[str, Any]:
    """The function of metrics adds up over batches."""
    right: list[float] = []
    more: list[Any] = []

    def add(predicted: Any, compute_result: bool) -> dict[str, float]:
        more.append([summarize(predicted.inputs), summarize(predicted.losses)])
        answers = torch.as_tensor(predicted.predictions).argmax(-1) == torch.as_tensor(predicted.label_ids)
        right.extend(answers.float().tolist())
        return {"right": sum(right) / len(right), "samples": float(len(right))} if compute_result else {}

    options = {"batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]}
    trainer = make_trainer(folder, compute_metrics=add, eval_strategy="steps", eval_steps=3, **options)
    trainer.train()
    return {**tell(trainer), "more": plain(more)}


@CASES.add
def best_of_several(folder: Path) -> dict[str, Any]:
    """The best checkpoint by a metric of one of two data sets, with few kept."""
    trainer = make_trainer(
        folder,
        eval_dataset={"a": make_sentences(21), "b": make_sentences(5)},
        compute_metrics=measure,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        max_steps=8,
        load_best_model_at_end=True,
        metric_for_best_model="eval_a_loss",
        save_total_limit=2,
    )
    trainer.train()
    return {**tell(trainer), "best": Path(trainer.state.best_model_checkpoint).name}


def make_bart() -> BartForConditionalGeneration:
    """Return a model from sequence to sequence."""
    torch.manual_seed(0)
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "d_model": 16,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    words = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    }
    config = BartConfig(vocab_size=24, max_position_embeddings=32, **sizes, **heads, **words)
    return BartForConditionalGeneration(config)


def sequences(folder: Path, **options: Any) -> dict[str, Any]:
    """Train and evaluate by generating."""
    draw = torch.Generator().manual_seed(2)
    rows = [
        {
            "input_ids": torch.randint(3, 24, (6,), generator=draw),
            "labels": torch.randint(3, 24, (5,), generator=draw),
        }
        for _ in range(19)
    ]
    kept: list[Any] = []

    def keep(predicted: Any) -> dict[str, float]:
        kept.append([summarize(predicted.predictions), summarize(predicted.label_ids)])
        return {"longest": float(predicted.predictions.shape[1])}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=6,
        learning_rate=5e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        dataloader_pin_memory=False,
        **{"predict_with_generate": True, **options},
    )
    trainer = make_trainer(
        folder,
        make_bart(),
        kind=Seq2SeqTrainer,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:7],
        compute_metrics=keep,
    )
    trainer.train()
    predicted = trainer.predict(rows[:5], max_length=9, num_beams=2)
    again = without_times([trainer.evaluate(rows[:3], max_length=7)])
    return {**tell(trainer), "kept": kept, "predicted": summarize(predicted.predictions), "again": again}


@CASES.add
def generated(folder: Path) -> dict[str, Any]:
    return sequences(folder, generation_max_length=8, generation_num_beams=1)


@CASES.add
def generated_by_config(folder: Path) -> dict[str, Any]:
    config = GenerationConfig(
        max_length=6, num_beams=2, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1
    )
    return sequences(folder, generation_config=config, gradient_accumulation_steps=2)


@CASES.add
def not_generated(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = {"predict_with_generate": False, "prediction_loss_only": True}
    return sequences(folder, **data)


ALONE = {
    "loss_only",
    "bf16",
    "workers",
    "processed_logits",
    "label_smoothing",
    "accumulated",
    "not_generated",
}
"""What has nothing to do with the number of processes is tried on one, to save time."""
