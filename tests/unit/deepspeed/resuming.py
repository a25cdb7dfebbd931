"""What runs in the processes of the tests that resume training by DeepSpeed on another number of processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from notebook_accel import Accelerator, DeepSpeedPlugin, skip_first_batches
from notebook_accel.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler
from tests.unit.deepspeed.ranks import accelerator, said

BATCH = 12  # of all processes together
STEPS = 2  # of each run
WORLDS = (2, 3, 1, 4)  # processes of each run


class Net(torch.nn.Module):
    """Has what is easily forgotten: a frozen layer, a buffer that counts, and fewer elements than processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fixed, self.last = (torch.nn.Linear(*sizes) for sizes in ((7, 5), (5, 5), (5, 1)))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("passes", torch.zeros(()))
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.last(self.fixed(self.first(x))) * self.scale * (1 + self.passes / 10)

    def groups(self) -> list[dict[str, Any]]:
        matrices = [self.first.weight, self.last.weight, self.scale]
        return [
            {"params": matrices, "lr": 0.05, "weight_decay": 0.5},
            {"params": [self.first.bias, self.last.bias], "lr": 0.02, "weight_decay": 0.0},
        ]


class Points(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Numbered points."""

    def __init__(self) -> None:
        self.x = torch.randn(BATCH * STEPS * len(WORLDS), 7, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.x[index]


class Grouped(torch.optim.SGD):
    """Keeps three values for each tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for item in group["params"]:
                self.state[item]["three"] = torch.zeros(3)


def adamw(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.groups())


def momentum(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.groups(), momentum=0.9)


def plugin(stage: int, **options: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage, **options}})


CASES: dict[str, tuple[dict[str, Any], Callable[[Net], torch.optim.Optimizer]]] = {
    "ZeRO 0": ({"stage": 0}, adamw),
    "ZeRO 1": ({"stage": 1}, momentum),
    "ZeRO 2": ({"stage": 2}, adamw),
    "ZeRO 3": ({"stage": 3}, momentum),
    "ZeRO 2, parameters in turns": ({"stage": 2, "round_robin_gradients": True}, adamw),
    "ZeRO 3, in parts": ({"stage": 3, "sub_group_size": 8, "stage3_param_persistence_threshold": 0}, adamw),
}


def loss_of(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((y.flatten() - x.sum(1)) ** 2).mean()


def decay(step: int) -> float:
    return 0.9**step


def go_on(
    run: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Iterable[Any]
) -> tuple[list[list[int]], list[float]]:
    """Train some steps; return the numbers of the points of each batch, and the losses."""
    seen, losses = [], []
    for _, (numbers, x) in zip(range(STEPS), loader, strict=False):
        loss = loss_of(model(x), x)
        run.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        seen.append(run.gather(numbers).tolist())
        losses.append(float(run.reduce(loss.detach(), "mean")))
    return seen, losses


def start(options: dict[str, Any], make: Callable[[Net], torch.optim.Optimizer], **others: Any) -> Any:
    """Return an accelerator and what it prepared, with a model whose weights are new."""
    run = accelerator(
        deepspeed_plugin=plugin(**options),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **others,
    )
    torch.manual_seed(run.num_processes)
    model = Net()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    loader = torch.utils.data.DataLoader(Points(), batch_size=BATCH, shuffle=True)
    return run, *run.prepare(model, optimizer, scheduler, loader)


def train_a_part(folder: str, number: int) -> dict[str, Any]:
    """Go on where the run before this one saved, and save.

    Args:
        folder: of all checkpoints.
        number: of the run, from 0.
    """
    found: dict[str, Any] = {}
    for name, (options, make) in CASES.items():
        run, model, optimizer, scheduler, loader = start(options, make)
        weights = {}
        if number:
            run.load_state(f"{folder}/{name}/{number - 1}")
            loader = skip_first_batches(loader, number * STEPS)
        else:
            weights = {key: value.clone() for key, value in run.get_state_dict(model).items()}
        seen, losses = go_on(run, model, optimizer, scheduler, loader)
        run.save_state(f"{folder}/{name}/{number}")
        found[name] = {"seen": seen, "losses": losses, "weights": weights}
        run.free_memory()
    return found


def with_deepspeeds_own(folder: str, number: int) -> dict[str, Any]:
    """Train in bfloat16 with the optimizer and the schedule of DeepSpeed's config, and loaders as they are."""
    config = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}},
    }
    run = accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision="bf16")
    model = Net()
    stand_in = DummyOptim([item for item in model.parameters() if item.requires_grad])
    loader = torch.utils.data.DataLoader(Points(), batch_size=BATCH // run.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = run.prepare(model, stand_in, DummyScheduler(stand_in), loader)
    if number:
        run.load_state(f"{folder}/own/{number - 1}")
        loader = skip_first_batches(loader, number * STEPS)
    before = optimizer.optimizer.single_partition_of_fp32_groups[0].clone()
    seen, losses = go_on(run, model, optimizer, None, loader)
    run.save_state(f"{folder}/own/{number}")
    return {
        "seen": seen,
        "losses": losses,
        "rate": scheduler.get_last_lr(),
        "rounded": bool((before == before.bfloat16()).all()),
        "steps": model.global_steps,
    }


def fail_to_save(folder: str) -> list[str]:
    """Return what each rank is told if DeepSpeed cannot write on the second one."""
    told = []
    for stage in (2, 3):
        run, *rest = start({"stage": stage}, adamw)
        model = rest[0]
        go_on(run, *rest)
        run.save_state(f"{folder}/whole/{stage}")
        if run.process_index == run.num_processes - 1:
            model.checkpoint_engine.save = full_disk
        told.append(said(lambda: run.save_state(f"{folder}/whole/{stage}")))  # noqa: B023 - called at once
        run.load_state(f"{folder}/whole/{stage}")
    return told


def change_order(folder: str) -> dict[str, Any]:
    """Return what becomes of checkpoints of as many processes whose parameters are in another order."""
    name = "ZeRO 2, parameters in turns"
    run, model, optimizer, scheduler, loader = start({"stage": 2}, adamw)
    run.load_state(f"{folder}/{name}/0")
    found = {"losses": go_on(run, model, optimizer, scheduler, skip_first_batches(loader, STEPS))[1]}
    run, *_ = start({"stage": 2}, lambda model: torch.optim.AdamW(model.groups()[::-1]))
    return {**found, "groups": said(lambda: run.load_state(f"{folder}/ZeRO 2/0"))}


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError("No space left on device")


def save_what_does_not_fit(folder: str) -> None:
    run, *rest = start({"stage": 1}, lambda model: Grouped(model.groups()))
    go_on(run, *rest)
    run.save_state(f"{folder}/three")


def load_what_does_not_fit(folder: str) -> dict[str, str]:
    """Return how checkpoints of another number of processes are refused."""
    told = {}
    run, *_ = start({"stage": 1}, lambda model: Grouped(model.groups()))
    told["three"] = said(lambda: run.load_state(f"{folder}/three"))
    for stage in (1, 3):
        name = f"ZeRO {stage}"
        run, *_ = start({"stage": stage}, lambda model: torch.optim.AdamW(model.groups()[::-1]))
        told[f"{name}, groups"] = said(lambda: run.load_state(f"{folder}/{name}/0"))  # noqa: B023 - at once
        run, *_ = start({"stage": stage}, lambda model: torch.optim.AdamW(model.groups()[:1]))
        told[f"{name}, fewer"] = said(lambda: run.load_state(f"{folder}/{name}/0"))  # noqa: B023 - at once
        run, *_ = start({"stage": stage}, adamw)
        if run.process_index == 1:
            shard = next(Path(folder, name, "0").glob("*/*zero_pp_rank_1*optim_states.pt"))
            whole = shard.read_bytes()
            shard.write_bytes(b"0" * len(whole))
        run.wait_for_everyone()
        told[f"{name}, damaged"] = said(lambda: run.load_state(f"{folder}/{name}/0"))  # noqa: B023 - at once
        run.wait_for_everyone()
        if run.process_index == 1:
            shard.write_bytes(whole)
    return told


def do(folder: str, number: int) -> dict[str, Any]:
    """Do all that one launch has to do; what fails is told as text."""
    todo: dict[str, Callable[[], Any]] = {"parts": lambda: train_a_part(folder, number)}
    todo["own"] = lambda: with_deepspeeds_own(folder, number)
    if number == 0:
        todo |= {"order": lambda: change_order(folder)}
        todo |= {"fail": lambda: fail_to_save(folder), "three": lambda: save_what_does_not_fit(folder)}
    if number == 1:
        todo["misfit"] = lambda: load_what_does_not_fit(folder)
    found: dict[str, Any] = {}
    for name, action in todo.items():
        try:
            found[name] = action()
        except Exception:
            found[name] = traceback.format_exc()
    return found
