"""How Trainer reads its data: loaders, samplers, and data sets of all kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback

from .parts import (
    Table,
    make_lines,
    make_sentences,
    make_trainer,
    measure,
    numbers,
    pad,
    plain,
    tell,
    train,
    without_times,
)

CASES = Table()
EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"}
RESUMED = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5}


class Noting(Trainer):
    """Notes the samples of each step; the first word of a sentence stands for it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Any] = []

    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        self.seen.append([inputs["input_ids"].tolist(), sorted(inputs)])
        return super().training_step(model, inputs, *more)

    def prediction_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        self.seen.append(["evaluation", inputs["input_ids"].tolist()])
        return super().prediction_step(model, inputs, *more, **named)


def load(folder: Path, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Train, evaluate and predict, and return what each step saw."""
    trainer = make_trainer(folder, kind=Noting, compute_metrics=measure, **options)
    trainer.train(resume_from_checkpoint=resume)
    evaluated = without_times([trainer.evaluate()])
    predicted = trainer.predict(trainer.eval_dataset)
    shown = [plain(predicted.predictions), plain(predicted.label_ids), *without_times([predicted.metrics])]
    return {
        **tell(trainer),
        "seen": trainer.seen,
        "evaluated": evaluated,
        "predicted": shown,
        "next": numbers(),
    }


def load_and_resume(folder: Path, make: Any, **options: Any) -> dict[str, Any]:
    """Train on new data twice, the second time from the middle."""
    whole = load(folder, **{**RESUMED, **options}, **make())
    return {
        "whole": whole,
        "again": load(folder, str(folder / "checkpoint-3"), **{**RESUMED, **options}, **make()),
    }


def configured(**options: Any) -> dict[str, Any]:
    """Return arguments for two epochs with options of the accelerator."""
    return {**EPOCHS, "accelerator_config": options}


class Stream(IterableDataset[Any]):
    """Sentences one after the other.

    Args:
        number: of sentences.
        generator: orders them; the trainer seeds it.
    """

    def __init__(self, number: int, generator: torch.Generator | None = None) -> None:
        self.rows = make_sentences(number)
        self.generator = generator
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.rows)))
        if self.generator is not None:
            order = torch.randperm(len(self.rows), generator=self.generator).tolist()
        yield from (self.rows[row] for row in order)


class StreamOfEpochs(Stream):
    """Has another order in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.generator = torch.Generator().manual_seed(epoch)


class SizedStream(Stream):
    """Knows how many sentences it has."""

    def __len__(self) -> int:
        return len(self.rows)


def make_table(number: int) -> datasets.Dataset:
    """Return a data set of `datasets` with a column that the model does not take."""
    rows = [
        {**{key: plain(value) for key, value in row.items()}, "note": "x"} for row in make_sentences(number)
    ]
    return datasets.Dataset.from_list(rows)


def make_stream(number: int, shards: int = 1) -> datasets.IterableDataset:
    """Return a stream of `datasets`, shuffled."""
    return make_table(number).to_iterable_dataset(num_shards=shards).shuffle(seed=3, buffer_size=8)


ORDINARY: dict[str, dict[str, Any]] = {
    "ordinary": EPOCHS,
    "uneven": {**EPOCHS, "per_device_train_batch_size": 5, "per_device_eval_batch_size": 6},
    "last_dropped": {**EPOCHS, "dataloader_drop_last": True},
    "workers": {**EPOCHS, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 1},
    "lasting_workers": {**EPOCHS, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "pinned": {**EPOCHS, "dataloader_pin_memory": True, "accelerator_config": {"non_blocking": True}},
    "split_batches": configured(split_batches=True),
    "dispatched": configured(dispatch_batches=True),
    "dispatched_and_split": configured(dispatch_batches=True, split_batches=True),
    "uneven_ends": {
        **configured(even_batches=False),  # as many batches for each, else processes wait for each other
        "train_dataset": make_sentences(39),
        "eval_dataset": make_sentences(16),
    },
    "not_seedable": configured(use_seedable_sampler=False),
    "data_seed": {**EPOCHS, "data_seed": 11},
    "in_order": {**EPOCHS, "train_sampling_strategy": "sequential"},
    "few": {**EPOCHS, "train_dataset": make_sentences(3), "eval_dataset": make_sentences(1)},
}
for name, options in ORDINARY.items():
    CASES[name] = lambda folder, options=options: load(folder, **options)

STREAMED: dict[str, dict[str, Any]] = {
    "stream": {},
    "stream_not_dispatched": {"accelerator_config": {"dispatch_batches": False}},
    "stream_dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "stream_split": {"accelerator_config": {"split_batches": True}},
    "stream_accumulated": {"gradient_accumulation_steps": 2},
    "stream_last_dropped": {"dataloader_drop_last": True},
    "stream_with_workers": {"dataloader_num_workers": 1},
}
for name, options in STREAMED.items():
    CASES[name] = lambda folder, options=options: load(
        folder, max_steps=7, train_dataset=Stream(21), eval_dataset=Stream(10), **options
    )


@CASES.add
def by_length(folder: Path) -> dict[str, Any]:
    """Sentences of about one length go together."""
    options = {"train_dataset": make_lines(29), "eval_dataset": make_lines(11), "data_collator": pad}
    trainer = make_trainer(
        folder,
        kind=Noting,
        train_sampling_strategy="group_by_length",
        compute_metrics=measure,
        **EPOCHS,
        **options,
    )
    trainer.train()
    return {**tell(trainer), "seen": trainer.seen}


@CASES.add
def ordered_stream(folder: Path) -> dict[str, Any]:
    """The generator of a stream is seeded on all processes."""
    stream = Stream(21, torch.Generator().manual_seed(5))
    return load(folder, max_steps=7, train_dataset=stream, eval_dataset=Stream(10))


@CASES.add
def stream_of_epochs(folder: Path) -> dict[str, Any]:
    """A stream hears of each epoch."""
    stream = StreamOfEpochs(21)
    return {
        **load(folder, max_steps=9, train_dataset=stream, eval_dataset=Stream(10)),
        "epochs": stream.epochs,
    }


@CASES.add
def sized_stream(folder: Path) -> dict[str, Any]:
    """A stream with a length needs no number of steps."""
    return load(folder, **EPOCHS, train_dataset=SizedStream(21), eval_dataset=SizedStream(10))


@CASES.add
def resumed(folder: Path) -> dict[str, Any]:
    return load_and_resume(folder, dict)


@CASES.add
def resumed_dispatched(folder: Path) -> dict[str, Any]:
    return load_and_resume(folder, dict, accelerator_config={"dispatch_batches": True})


@CASES.add
def resumed_stream(folder: Path) -> dict[str, Any]:
    return load_and_resume(folder, lambda: {"train_dataset": Stream(50), "eval_dataset": Stream(10)})


@CASES.add
def resumed_ignoring(folder: Path) -> dict[str, Any]:
    return load_and_resume(
        folder, lambda: {"train_dataset": Stream(50), "eval_dataset": Stream(10)}, ignore_data_skip=True
    )


@CASES.add
def table(folder: Path) -> dict[str, Any]:
    """A data set of `datasets` loses the columns that the model does not take."""
    return load(folder, **EPOCHS, train_dataset=make_table(21), eval_dataset=make_table(10))


@CASES.add
def table_as_tensors(folder: Path) -> dict[str, Any]:
    """A data set of `datasets` in torch's format, and all its columns kept."""
    data = {
        "train_dataset": make_table(21).remove_columns("note").with_format("torch"),
        "eval_dataset": make_table(10).remove_columns("note").with_format("torch"),
    }
    return load(folder, **EPOCHS, remove_unused_columns=False, **data)


@CASES.add
def table_streamed(folder: Path) -> dict[str, Any]:
    return load(folder, max_steps=7, train_dataset=make_stream(21), eval_dataset=make_stream(10))


@CASES.add
def table_in_shards(folder: Path) -> dict[str, Any]:
    """A stream of several shards is not dispatched, so that each process may read shards of its own."""
    options = {"accelerator_config": {"dispatch_batches": False}, "dataloader_num_workers": 1}
    return load(
        folder, max_steps=7, train_dataset=make_stream(32, 4), eval_dataset=make_stream(16, 4), **options
    )


@CASES.add
def table_split_by_node(folder: Path) -> dict[str, Any]:
    """The user has given each process its share of a stream."""
    from datasets.distributed import split_dataset_by_node

    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    stream = split_dataset_by_node(make_stream(21, 2), rank=rank, world_size=world)
    return load(folder, max_steps=5, train_dataset=stream, eval_dataset=make_stream(10, 2))


@CASES.add
def table_resumed(folder: Path) -> dict[str, Any]:
    return load_and_resume(
        folder, lambda: {"train_dataset": make_stream(60), "eval_dataset": make_stream(10)}
    )


@CASES.add
def several_evaluations(folder: Path) -> dict[str, Any]:
    """Evaluation data sets by name."""
    several = {"one": make_sentences(9), "two": make_sentences(6)}
    return train(folder, **EPOCHS, eval_dataset=several, compute_metrics=measure)


class Words(Dataset[Any]):
    """Sentences with other things beside tensors."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**make_sentences(17)[row], "name": f"row {row}"}

    def __len__(self) -> int:
        return 17


@CASES.add
def words_and_tensors(folder: Path) -> dict[str, Any]:
    """Batches have strings, which the trainer's subclass takes out."""
    names: list[Any] = []

    class Taking(Noting):
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            names.append(inputs.pop("name"))
            return super().compute_loss(model, inputs, *more, **named)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        tensors = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}
        return {**tensors, "name": [row["name"] for row in rows]}

    found = train(
        folder,
        kind=Taking,
        **{**EPOCHS, "eval_strategy": "no"},
        train_dataset=Words(),
        data_collator=collate,
        remove_unused_columns=False,
    )
    return {**found, "names": names}


class Reader(TrainerCallback):
    """Notes what callbacks may read of a prepared loader."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **more: Any
    ) -> None:
        loader = train_dataloader
        self.found.append(
            {
                "length": len(loader),
                "batch_size": [loader.batch_size, loader.total_batch_size, loader.total_dataset_length],
                "sampler": [type(loader.sampler).__name__, type(loader.batch_sampler).__name__],
                "drop_last": loader.drop_last,
                "workers": loader.num_workers,
                "same": loader.dataset is not None,
            }
        )


@CASES.add
def loaders_read(folder: Path) -> dict[str, Any]:
    """Attributes of the loader that a callback is given."""
    reader = Reader()
    return {**train(folder, **EPOCHS, callbacks=[reader]), "read": reader.found}


ALONE = {"lasting_workers", "pinned", "data_seed", "in_order", "several_evaluations", "table_as_tensors"}
"""What has nothing to do with the number of processes is tried on one, to save time."""
