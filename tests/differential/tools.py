"""Cases: trackers, local SGD, the batch size that fits, loggers, the profiler, ranks."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.differential.parts import linear, parameters, regression, sgd


def tracker(library: Any, fails: bool = False) -> Any:
    """Return a tracker that notes what it is told."""
    base: Any = importlib.import_module(f"{library.__name__}.tracking").GeneralTracker

    class Notes(base):  # type: ignore[misc]
        name = "fails" if fails else "notes"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self.seen

        def start(self) -> None:
            self.seen.append("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.seen.append(("config", values))

        def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
            if fails:
                raise KeyError(step)
            self.seen.append((values, step, options))

        def finish(self) -> None:
            self.seen.append("finish")

    return Notes()


def tracked(library: Any) -> Any:
    notes = tracker(library)
    accelerator = library.Accelerator(cpu=True, log_with=notes)
    accelerator.log({"before": 1})
    accelerator.init_trackers("project", config={"lr": 0.1, "odd": [None, {"a": Path("b")}]})
    accelerator.log({"loss": torch.tensor(0.5)}, step=2, log_kwargs={"notes": {"commit": True}})
    accelerator.log({"text": "x", "nested": {"a": 1}})
    found = accelerator.get_tracker("notes", unwrap=True) is notes.seen
    return str(notes.seen), found


def tracked_twice(library: Any) -> Any:
    notes = tracker(library)
    accelerator = library.Accelerator(cpu=True, log_with=notes)
    accelerator.init_trackers("first")
    accelerator.init_trackers("second")
    return notes.seen


def a_tracker_fails(library: Any) -> Any:
    """Only rank 0 sees the error."""
    notes = tracker(library)
    accelerator = library.Accelerator(cpu=True, log_with=[notes, tracker(library, fails=True)])
    accelerator.init_trackers("project")
    raised = False
    try:
        accelerator.log({"a": 1})
    except KeyError:
        raised = True
    accelerator.wait_for_everyone()
    return raised, notes.seen


def tensorboard(library: Any, values: dict[str, Any], config: dict[str, Any] | None = None) -> Any:
    """Return the numbers that TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        accelerator = library.Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
        accelerator.init_trackers("run", config=config)
        accelerator.log(values, step=3)
        for tracking in accelerator.trackers:
            tracking.finish()
        if not accelerator.is_main_process:
            return None
        events = EventAccumulator(os.path.join(folder, "run"))
        events.Reload()
        found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        return found, [path.read_text() for path in Path(folder).rglob("*.yml")]


def averaged(library: Any, steps: int, accumulation: int = 1) -> Any:
    local = importlib.import_module(f"{library.__name__}.local_sgd").LocalSGD
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = linear()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), regression(14))
    seen = []
    with local(accelerator=accelerator, model=model, local_sgd_steps=steps, enabled=True) as sgd_steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                sgd_steps.step()
            seen.append(parameters(accelerator, model))
    return seen, parameters(accelerator, model)


def batch_size(library: Any, error: Exception, **options: Any) -> Any:
    tried = []

    @library.utils.find_executable_batch_size(starting_batch_size=100, **options)
    def run(size: int, *args: Any, **named: Any) -> Any:
        tried.append(size)
        if size > 30:
            raise error
        return size, args, named

    try:
        return run(1, two=2), run(), tried
    except RuntimeError as raised:
        return str(raised), tried


def logged(library: Any) -> Any:
    module = importlib.import_module(f"{library.__name__}.logging")
    text = io.StringIO()
    plain = logging.getLogger("differential")
    plain.propagate = False
    plain.addHandler(handler := logging.StreamHandler(text))
    before = logging.root.level
    try:
        library.Accelerator(cpu=True)
        log = module.get_logger("differential", log_level="info")
        log.info("main %s", 1)
        log.debug("quiet")
        log.info("all", main_process_only=False)
        log.error("in order", main_process_only=False, in_order=True)
        for _ in range(2):
            log.warning_once("once")
        return text.getvalue().splitlines(), log.getEffectiveLevel(), log.isEnabledFor(logging.DEBUG)
    finally:
        plain.removeHandler(handler)
        logging.root.setLevel(before)


def profiled(library: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        handler = library.utils.ProfileKwargs(output_trace_dir=folder, **options)
        accelerator = library.Accelerator(cpu=True, kwargs_handlers=[handler])
        with accelerator.profile() as profiler:
            for _ in range(6):
                torch.ones(4, 4).mm(torch.ones(4, 4))
                if "schedule_option" in options:
                    profiler.step()
        path = Path(folder, f"profile_{accelerator.process_index}.json")
        names = {str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]}
        return sorted(path.name for path in Path(folder).iterdir()), "aten::mm" in names


def ranks(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    return {
        kind: getattr(accelerator, f"{kind}_rank")
        for kind in (
            "data_parallel",
            "data_parallel_shard",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
        )
    }


def flags(library: Any) -> Any:
    accelerator = library.Accelerator(cpu=True)
    with accelerator.maybe_context_parallel(buffers=[torch.ones(1)], buffer_seq_dims=[0]):
        return accelerator.multi_device, accelerator.use_distributed, accelerator.split_batches


def clipped_alone(library: Any) -> Any:
    """The norm of a single tensor that is passed without a list."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    return library.Accelerator(cpu=True).clip_grad_norm_(weight, 1.0), weight.grad


def halved() -> Callable[[], int]:
    sizes = iter([50, 25])
    return lambda: next(sizes)


NUMBERS = {"int": 1, "float": 2.5, "tensor": torch.tensor(1.5), "nan": float("nan")}
CYCLE = {"wait": 1, "warmup": 1, "active": 1, "repeat": 0, "skip_first": 1}
CASES: dict[str, Callable[[Any], Any]] = {
    "tracked": tracked,
    "tracked twice": tracked_twice,
    "a tracker fails": a_tracker_fails,
    "tensorboard": partial(tensorboard, values=NUMBERS, config={"lr": 0.1, "text": "x", "flag": True}),
    "tensorboard, odd numbers": partial(tensorboard, values={"a": np.float32(1.5), "b": torch.tensor([2])}),
    "tensorboard, odd config": partial(
        tensorboard, values={}, config={"a": None, "b": [1], "c": torch.float16}
    ),
    "local SGD": partial(averaged, steps=2),
    "local SGD, accumulated": partial(averaged, steps=2, accumulation=2),
    "local SGD, rarely": partial(averaged, steps=20),
    "batch size": partial(batch_size, error=RuntimeError("CUDA out of memory. Tried to")),
    "batch size, CPU": partial(batch_size, error=RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    "batch size, another error": partial(batch_size, error=RuntimeError("shapes differ")),
    "batch size, torch's error": partial(batch_size, error=torch.OutOfMemoryError("no more")),
    "logged": logged,
    "profiled": partial(profiled, activities=["cpu"]),
    "profiled, schedule": partial(profiled, activities=["cpu"], schedule_option=CYCLE),
    "profiled, what is not here": partial(profiled, activities=["cpu", "cuda"]),
    "ranks": ranks,
    "flags": flags,
    "clip alone": clipped_alone,
}
