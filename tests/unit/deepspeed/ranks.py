"""What runs in the processes of the tests of DeepSpeed; the library's import takes seconds, so one launch does all."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from notebook_accel import Accelerator, DeepSpeedPlugin
from notebook_accel.state import AcceleratorState
from notebook_accel.utils import DummyOptim, DummyScheduler, patch_environment
from tests.unit.deepspeed.small_gpt import SmallGPT, Source

STEPS = 50
BATCH = 4  # of a process
AUTOS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def accelerator(**arguments: Any) -> Accelerator:
    """Return one that settles everything anew."""
    AcceleratorState._reset_state()
    return Accelerator(**arguments)


def schedule(step: int) -> float:
    """Rates by the steps of one process; two processes get through two in a step."""
    return min(1.0, (step + 1) / 20) * (1 - step / (4 * STEPS))


def parts(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(seed)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = torch.utils.data.DataLoader(Source(2 * 2 * BATCH * STEPS), batch_size=BATCH)
    return model, optimizer, scheduler, loader


def train(
    run: Accelerator, model: Any, optimizer: Any, scheduler: Any, batches: Iterable[torch.Tensor], count: int
) -> tuple[list[float], list[float]]:
    """Go on for a number of batches, as every loop of an accelerator does; return losses and norms of gradients."""
    losses, norms = [], []
    for _, batch in zip(range(count), batches, strict=False):
        with run.accumulate(model):
            loss = model(batch)
            run.backward(loss)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    return losses, norms


def zero(stage: int, folder: str) -> dict[str, Any]:
    """Train half, with gradients in between that are discarded, save, load into other objects, and train the rest."""
    warnings.simplefilter("error", FutureWarning)
    run = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = run.prepare(*parts())
    first = {name: value.clone() for name, value in run.get_state_dict(model).items()}
    for _ in range(10):  # gathering must not end before the weights are there
        again = run.get_state_dict(model)
        assert all(torch.equal(first[name], value) for name, value in again.items())
    batches = iter(loader)
    losses, norms = train(run, model, optimizer, scheduler, batches, STEPS // 2 + 1)
    run.backward(model(torch.arange(48).view(2, 24)) * 1000)  # gradients that nobody wants
    optimizer.zero_grad()
    more = train(run, model, optimizer, scheduler, batches, STEPS // 2 - 1)
    losses, norms = losses + more[0], norms + more[1]
    run.save_state(folder)
    run.free_memory()

    model, optimizer, scheduler, loader = run.prepare(*parts(seed=1))
    run.load_state(folder)
    rest = run.skip_first_batches(loader, STEPS)
    more = train(run, model, optimizer, scheduler, rest, STEPS)
    run.save_model(model, f"{folder}-weights")
    return {
        "type": run.distributed_type.value,
        "first": first,
        "losses": losses + more[0],
        "norms": norms + more[1],
        "refusals": refusals(run, model, optimizer, folder),
        "held": sum(item.numel() for item in model.parameters()),
    }


def said(action: Callable[[], object]) -> str:
    """Return the error that an action ends with."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(run: Accelerator, model: Any, optimizer: Any, folder: str) -> dict[str, str]:
    first = next(iter(model.parameters()))
    missing = Path(folder, "pytorch_model_1")
    found = {
        "value": said(lambda: run.clip_grad_value_(model.parameters(), 1.0)),
        "kind": said(lambda: run.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)),
        "part": said(lambda: run.clip_grad_norm_([first], 1.0)),
        "stranger": said(lambda: run.clip_grad_norm_([torch.ones(1)], 1.0)),
        "closure": said(lambda: optimizer.step(lambda: 1.0)),
        "alone": said(lambda: run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))),
        "background": said(lambda: run.save_state(f"{folder}-b", async_save=True)),
    }
    run.wait_for_everyone()
    if run.is_main_process:
        missing.mkdir()
    run.wait_for_everyone()
    found["count"] = said(lambda: run.load_state(folder))
    run.wait_for_everyone()
    if run.is_main_process:
        missing.rmdir()
        (path,) = Path(folder, "pytorch_model").glob("*zero_pp_rank_1_*optim_states.pt")
        path.rename(Path(folder, "gone"))
    run.wait_for_everyone()
    found["shard"] = said(lambda: run.load_state(folder))
    run.wait_for_everyone()
    if run.is_main_process:
        Path(folder, "gone").rename(path)
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    run.wait_for_everyone()
    found["damaged"] = said(lambda: run.load_state(folder))
    run.wait_for_everyone()
    if run.is_main_process:
        path.write_bytes(content)
    run.wait_for_everyone()
    return found


def loops(stage: int) -> list[list[float]]:
    """Return losses of loops that accumulate by hand, in three ways."""
    found = []
    for way in ("by hand", "no_sync", "cleared first"):
        run = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model, optimizer, _, loader = run.prepare(*parts())
        losses = []
        batches = iter(loader)
        for _ in range(4):
            one, other = next(batches), next(batches)
            if way == "cleared first":
                optimizer.zero_grad()
            if way == "no_sync":
                with run.no_sync(model):
                    run.backward(model(one) / 2)
            else:
                run.backward(model(one) / 2)
            loss = model(other)
            run.backward(loss / 2)
            optimizer.step()
            if way != "cleared first":
                optimizer.zero_grad()
            losses.append(float(run.reduce(loss.detach(), "mean")))
        found.append(losses)
    return found


def autos(folder: str) -> dict[str, Any]:
    """Train as a launch with a config file would: by variables, with stand-ins."""
    path = Path(folder, f"auto-{os.environ['RANK']}.json")
    path.write_text(json.dumps(AUTOS))
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
    }
    with patch_environment(**variables):
        run = accelerator(gradient_accumulation_steps=2)
    model, _, _, loader = parts()
    stand_in = DummyOptim(model.parameters(), lr=2e-3, weight_decay=0.1, betas=[0.8, 0.9])
    rates = DummyScheduler(stand_in, total_num_steps=40, warmup_num_steps=8)
    model, optimizer, scheduler, loader = run.prepare(model, stand_in, rates, loader)
    seen, losses = [], []
    for _, batch in zip(range(20), loader, strict=False):
        with run.accumulate(model):
            seen.append(scheduler.get_last_lr()[0])
            loss = model(batch)
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach(), "mean")))
    config = {name: model.config[name] for name in ("train_batch_size", "gradient_accumulation_steps")}
    return {
        "rates": seen[::2],
        "losses": losses,
        "config": config,
        "optimizer": type(model.basic_optimizer).__name__,
        "group": {name: optimizer.param_groups[0][name] for name in ("weight_decay", "betas")},
        "kept": run.deepspeed_plugin.is_auto("optimizer.params.lr"),
    }


def transformers(folder: str) -> dict[str, Any]:
    """Make, train, save and load a model of Transformers that is sharded from the start."""
    import deepspeed
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers.integrations import is_deepspeed_zero3_enabled

    plugins = {"shards": DeepSpeedPlugin(zero_stage=3), "whole": DeepSpeedPlugin(zero_stage=2)}
    run = accelerator(deepspeed_plugin=plugins)
    enabled = [is_deepspeed_zero3_enabled()]
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    held = [sum(item.numel() for item in model.parameters())]
    loader = torch.utils.data.DataLoader(Source(32), batch_size=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            loss = model(batch, labels=batch).loss
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(run.reduce(loss.detach(), "mean")))
    state = run.get_state_dict(model)
    names = sorted(state)
    run.unwrap_model(model).save_pretrained(folder, state_dict=state, is_main_process=run.is_main_process)
    run.wait_for_everyone()
    again = AutoModelForCausalLM.from_pretrained(folder)  # sharded, too
    held.append(sum(item.numel() for item in again.parameters()))
    teacher = run.prepare_model(again, evaluation_mode=True)
    model.eval()
    with torch.no_grad():
        differ = float((teacher(batch).logits - model(batch).logits).abs().max())
    before = {name: value.clone() for name, value in run.get_state_dict(teacher).items()}
    run.save_state(f"{folder}-state")
    with deepspeed.zero.GatheredParameters([again.lm_head.weight], modifier_rank=0):
        again.lm_head.weight.data.zero_()
    spoilt = run.get_state_dict(teacher)
    run.load_state(f"{folder}-state")
    after = run.get_state_dict(teacher)
    with run.deepspeed_plugin.zero3_init_context_manager(enable=True):
        layer = torch.nn.Linear(64, 64)
    AcceleratorState().select_deepspeed_plugin("whole")
    enabled.append(is_deepspeed_zero3_enabled())
    stranger = said(lambda: AcceleratorState().select_deepspeed_plugin("other"))
    return {
        "enabled": enabled,
        "held": held,
        "losses": losses,
        "differ": differ,
        "spoilt": [name for name, value in before.items() if not torch.equal(spoilt[name], value)],
        "restored": all(torch.equal(after[name], value) for name, value in before.items()),
        "layer": layer.weight.numel(),
        "names": names,
        "stranger": stranger,
    }


def adversaries(run: Accelerator | None) -> list[float]:
    """Return what two models lose that train in turns, one of them with what the other makes."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizers: Any = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (maker, judge)]
    noise = torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(1))
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    share = slice(None)
    if run is not None:
        maker, judge, *optimizers = run.prepare(maker, judge, *optimizers)
        backward, share = run.backward, slice(4 * run.process_index, 4 * run.process_index + 4)
    losses = []
    for step in noise:
        own = step[share]
        made = maker(own)
        loss = (judge(made.detach()) ** 2).mean() + ((judge(own) - 1) ** 2).mean()
        backward(loss)
        optimizers[1].step()
        optimizers[1].zero_grad()
        other = ((judge(made) - 1) ** 2).mean()
        backward(other)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()  # also what the judge got from the maker's loss
        both = (loss + other).detach()
        losses.append(float(both if run is None else run.reduce(both, "mean")))
    return losses


def misfit(folder: str) -> list[str]:
    """Return how a checkpoint is refused that is of a model of another width, and of another ZeRO stage."""
    said_by_stage = []
    for stage in (2, 3):
        run = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), gradient_accumulation_steps=2)
        model = SmallGPT(width=16)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        run.prepare(model, optimizer, scheduler, parts()[3])
        for saved in (2, 3):
            said_by_stage.append(said(lambda: run.load_state(f"{folder}/{saved}")))  # noqa: B023 - called at once
    return said_by_stage


def several() -> list[float]:
    return adversaries(accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)))


CLIPPED: Mapping[tuple[float | None, float], float] = {(None, 0.0): 0.0, (0.5, 0.75): 0.5, (0.75, 0.5): 0.5}
"""By the config's own limit and one that is asked for: the norm of gradients that were larger."""


def clipped(stage: int, own: float | None, asked: float) -> float:
    """Return the norm of the gradients with which a step moves a layer, by a limit of the config and one asked for."""
    run = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=own))
    layer = torch.nn.Linear(8, 1)
    before = torch.nn.utils.parameters_to_vector(layer.parameters()).detach().clone()
    model, optimizer = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    run.backward(model(torch.ones(2, 8)).sum())
    assert run.clip_grad_norm_(model.parameters(), asked) > 1
    optimizer.step()
    after = run.get_state_dict(model)  # on the first process of a node, under ZeRO 3
    whole = run.gather(
        torch.cat([after[name].reshape(-1) for name in ("weight", "bias")]) if after else before
    )
    return float((whole[: len(before)] - before).norm() / 0.1)


def again(run: Accelerator | None) -> list[float]:
    """Return the losses of a layer that a new optimizer trains three times; only the first is prepared with it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 1)
    model: Any = layer
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for number in range(3):
        optimizer: Any = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
        if run is not None and number == 0:
            model, optimizer = run.prepare(layer, optimizer)
        elif run is not None:
            run.free_memory()
            optimizer = run.prepare(optimizer)
            assert run._models == [model]
        for _ in range(3):
            loss = ((model(x) - x.sum(dim=1, keepdim=True)) ** 2).mean()
            losses.append(float(loss.detach()))
            (torch.Tensor.backward if run is None else run.backward)(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def again_by(stage: int) -> list[Any]:
    """Return the losses of `again`, and what is said of a model without an optimizer."""
    run = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    return [again(run), said(lambda: run.prepare(torch.nn.Linear(2, 2)))]


def bf16() -> dict[str, Any]:
    run = accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), mixed_precision="bf16")
    layer = torch.nn.Linear(8, 1)
    model, optimizer = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(run.process_index))
    losses = []
    for _ in range(10):
        y = model(x)
        loss = ((y - x.sum(dim=1, keepdim=True)) ** 2).mean()
        run.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"weights": str(layer.weight.dtype), "outputs": str(y.dtype), "losses": losses}


def norms_in_bf16(stage: int, **more: Any) -> list[float]:
    """Return the norms of gradients that accumulate over batches and processes, by a config with more sections."""
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": stage}, **more})
    run = accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    model, optimizer = run.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(run.process_index))
    norms = []
    for number, batch in enumerate(x):
        with run.accumulate(model):
            run.backward((model(batch) ** 2).mean() * (number + 1))
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def everything(folder: str) -> dict[str, Any]:
    """Do all of it; what fails is told as text."""
    todo: dict[str, Callable[[], Any]] = {
        f"zero {stage}": lambda stage=stage: zero(stage, f"{folder}/{stage}") for stage in (1, 2, 3)
    }
    todo |= {f"loops {stage}": lambda stage=stage: loops(stage) for stage in (0, 1, 2, 3)}
    for stage in (0, 1, 2, 3):
        for limits in CLIPPED:
            todo[f"clipped {stage} {limits}"] = lambda stage=stage, limits=limits: clipped(stage, *limits)
    todo |= {f"again {stage}": lambda stage=stage: again_by(stage) for stage in (0, 1, 2, 3)}
    todo |= {f"norms in bf16 {stage}": lambda stage=stage: norms_in_bf16(stage) for stage in (0, 2)}
    in_float32 = {"grad_accum_dtype": "fp32"}
    todo |= {"norms in bf16, float32": lambda: norms_in_bf16(1, data_types=in_float32)}
    todo |= {"misfit": lambda: misfit(folder)}
    todo |= {"autos": lambda: autos(folder), "several": several, "bf16": bf16}
    todo |= {"transformers": lambda: transformers(f"{folder}/gpt2")}
    found: dict[str, Any] = {}
    for name, action in todo.items():
        try:
            found[name] = action()
        except Exception:
            found[name] = traceback.format_exc()
    return found
