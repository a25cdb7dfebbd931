"""Trainer of transformers on a tiny BERT: a training step, and an evaluation whose predictions are gathered.

A step lasts from the end of one to the end of the next: what each training costs beside its steps, of which Trainer's
garbage collection is the most, is the same for both and would hide them in a short one.

The take-over lasts as long as a process, so ours and Accelerate's run in processes of their own, a pair of them for two
ranks. All stay alive and take turns. The seconds are CPU time of rank 0: others may use the machine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from tests.benchmarks.subprocesses import ENVIRONMENT, ROOT
from tests.benchmarks.table import Row, compare, interleave
from tests.ports import free_port

ROUNDS = 8
SAMPLES = 1024
BATCH = 8
TARGETS: dict[str, dict[str, float | None]] = {
    "a step": {"accelerate": 0.85},
    "evaluation of a batch": {"accelerate": 0.6},
}


def run() -> list[Row]:
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: no Trainer", file=sys.stderr)
        return []
    rows: list[Row] = []
    for world in (1, 2):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ends = {
                name: stack.enter_context(serving(name, world, folder)) for name in ("ours", "accelerate")
            }
            for what, targets in TARGETS.items():
                contenders = {name: asking(end, what) for name, end in ends.items()}
                title = f"Trainer, {what}, {world} process{'es' * (world > 1)}"
                rows += compare(title, interleave(contenders, rounds=ROUNDS, warmup=2), targets)
    return rows


def asking(end: tuple[list[IO[str]], IO[str]], what: str) -> Callable[[], float]:
    orders, answers = end

    def one_round() -> float:
        for order in orders:
            print(what, file=order, flush=True)
        if not (answer := answers.readline()):
            raise RuntimeError(f"the ranks of {what} have ended")
        return float(answer)

    return one_round


@contextmanager
def serving(name: str, world: int, folder: str) -> Iterator[tuple[list[IO[str]], IO[str]]]:
    """Start the ranks of a contender; yield where each takes orders, and where rank 0 answers.

    One process alone has no variables of a launcher: with them Accelerate would wrap the model for several.
    """
    own = {"NOTEBOOK_ACCEL_AS_ACCELERATE": str(int(name == "ours"))}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    environment = {**os.environ, **ENVIRONMENT, **own, **(place if world > 1 else {})}
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from tests.benchmarks import bench_trainer; bench_trainer.serve()",
                folder,
            ],
            cwd=ROOT,
            env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield [rank.stdin for rank in ranks if rank.stdin], ranks[0].stdout  # type: ignore[misc]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def serve() -> None:
    """Be a rank: read an order from each line, and answer with the CPU seconds that it took."""
    if os.environ["NOTEBOOK_ACCEL_AS_ACCELERATE"] == "1":
        import notebook_accel

        notebook_accel.take_over_accelerate()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    trainer, ends = make_trainer(sys.argv[1])
    batches = SAMPLES // BATCH // int(os.environ.get("WORLD_SIZE", "1"))
    for line in sys.stdin:
        ends.clear()
        started = time.process_time()
        if line.strip() == "a step":
            trainer.train()
            seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        else:
            trainer.evaluate()
            seconds = (time.process_time() - started) / batches
        print(seconds, file=answers)


def make_trainer(folder: str) -> tuple[Any, list[float]]:
    """Return a Trainer, and a list of the CPU seconds at which its steps end."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    words = torch.randint(10, 60, (SAMPLES, 12))
    data: Any = [{"input_ids": line, "labels": line[3] % 2} for line in words]
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, max_position_embeddings=16, intermediate_size=16, **sizes)
    arguments = TrainingArguments(
        output_dir=folder,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=1,
        save_strategy="no",
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda found: {
            "right": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
        callbacks=[Clock()],
    )
    return trainer, ends
