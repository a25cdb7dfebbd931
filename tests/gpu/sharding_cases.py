"""Cases of models that are spread over ranks: FSDP, offloading, copies of shards, tensor and context parallel, fp8."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, probes
from notebook_accel.dtensors import is_sharded, to_full, to_local
from notebook_accel.fp8 import AORecipeKwargs
from tests.gpu import training_cases
from tests.gpu.cases import Unavailable, case, expect_close, make
from tests.gpu.training_cases import ROWS, STEPS, check_skipped, loss_of, prepare, rows, train, train_alone
from tests.unit import gpt

FULL, SHARDS = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=_is_linear, **options)


def places(prepared: Any, optimizer: Any) -> tuple[set[str], set[str]]:
    """Return the kinds of devices of the weights, and of the optimizer's state."""
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    return (
        {to_local(parameter).device.type for parameter in prepared.parameters()},
        {to_local(value).device.type for value in states},
    )


def resume(folder: Path, where: set[str] | None = None, **options: Any) -> None:
    """Train, save, train, load in a new model of another seed, and train again: the losses are the same."""
    accelerator = make(fsdp_plugin=plugin(**options))
    device = accelerator.device.type
    where = {device} if where is None or device == "cpu" else where
    prepared, optimizer, loader = prepare(accelerator)
    expected = train_alone(accelerator.device, 2 * STEPS)
    losses = train(accelerator, prepared, optimizer, loader)
    expect_close(losses, expected[:STEPS])
    assert all(is_sharded(parameter) for parameter in prepared.parameters())
    assert places(prepared, optimizer) == (where, where)
    accelerator.save_state(str(folder / "saved"))
    after = train(accelerator, prepared, optimizer, loader)
    for again in (prepared, None):
        if again is None:
            accelerator = make(fsdp_plugin=plugin(**options))
            built = training_cases.build()
            nn.init.ones_(built[0].weight)
            prepared, optimizer, loader = prepare(accelerator, built)
        accelerator.load_state(str(folder / "saved"))
        expect_close(train(accelerator, prepared, optimizer, loader), after, 1e-6)
        assert places(prepared, optimizer) == (where, where), "also after the load"


@case()
def resume_from_a_full_state(folder: Path) -> None:
    resume(folder, state_dict_type=FULL)


@case()
def resume_from_shards(folder: Path) -> None:
    resume(folder, state_dict_type=SHARDS)


@case()
def offloaded_from_a_full_state(folder: Path) -> None:
    resume(folder, {"cpu"}, state_dict_type=FULL, cpu_offload=True)


@case()
def offloaded_from_shards(folder: Path) -> None:
    resume(folder, {"cpu"}, state_dict_type=SHARDS, cpu_offload=True)


@case(ranks=2)
def shards_within_a_node_and_offload(folder: Path) -> None:
    resume(folder, {"cpu"}, sharding_strategy="HYBRID_SHARD", cpu_offload=True)


@case(ranks=4, most=4)
def copies_of_shards_and_offload(folder: Path) -> None:
    accelerator = make(
        fsdp_plugin=plugin(cpu_offload=True),
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    )
    prepared, optimizer, loader = prepare(accelerator)
    expect_close(train(accelerator, prepared, optimizer, loader), train_alone(accelerator.device))
    if accelerator.device.type == "cuda":
        assert places(prepared, optimizer) == ({"cpu"}, {"cpu"})


@case()
def whole_state_of_shards(folder: Path) -> None:
    accelerator = make(fsdp_plugin=plugin())
    built = training_cases.build()
    expected = {name: value.clone() for name, value in built.state_dict().items()}
    prepared, _, _ = prepare(accelerator, built)
    state = accelerator.get_state_dict(prepared)
    assert bool(state) == accelerator.is_local_main_process
    assert all(torch.equal(state[name], expected[name]) for name in state)
    full = [to_full(parameter).detach().cpu() for parameter in prepared.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(full, expected.values(), strict=True))


@case()
def shards_saved_in_the_background(folder: Path) -> None:
    accelerator = make(fsdp_plugin=plugin(state_dict_type=SHARDS))
    built = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(built, optimizer)
    accelerator.backward(model(torch.ones(1, 1024, device=accelerator.device)).sum())
    optimizer.step()
    optimizer.zero_grad()
    expected = to_local(next(model.parameters())).clone()
    on_gpu = accelerator.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    accelerator.save_state(str(folder / "saved"), async_save=True)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    with torch.no_grad():
        for parameter in model.parameters():
            to_local(parameter).zero_()
    accelerator.end_training()
    assert peak - before < 16 * expected.nbytes // 4, "no second copy of the weights on the device"
    accelerator.load_state(str(folder / "saved"))
    assert torch.equal(to_local(next(model.parameters())), expected)


@case()
def overflow_in_one_shard(folder: Path) -> None:
    for options in ({}, {"cpu_offload": True}):
        handlers = [training_cases.SCALING]
        accelerator = make(mixed_precision="fp16", kwargs_handlers=handlers, fsdp_plugin=plugin(**options))
        model, optimizer, _ = prepare(accelerator)
        x, y = (part.to(accelerator.device) for part in rows(ROWS))
        check_skipped(accelerator, optimizer, functools.partial(loss_of, model, x, y))


def _tensor_parallel(**options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = make(parallelism_config=ParallelismConfig(tp_size=2), **options)
    torch.manual_seed(1)
    built = gpt.GPT()
    split = list(built.blocks.parameters())  # these first
    whole = [parameter for parameter in built.parameters() if not any(parameter is other for other in split)]
    first = [parameter for parameter in split if parameter.ndim == 2]
    others = [parameter for parameter in split if parameter.ndim != 2]
    optimizer = torch.optim.AdamW([*first, *others, *whole], lr=1e-3)
    model, optimizer = accelerator.prepare(built, optimizer)
    return accelerator, model, optimizer


@case(ranks=2)
def tensor_parallel(folder: Path) -> None:
    accelerator, model, optimizer = _tensor_parallel()
    torch.manual_seed(1)
    alone = gpt.GPT().to(accelerator.device)
    by_hand = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    losses: list[tuple[float, float]] = []
    for batch in accelerator.prepare(gpt.loader(4, 3)):
        pair = gpt.loss_of(model, batch), gpt.loss_of(alone, batch)
        accelerator.backward(pair[0])
        pair[1].backward()
        for one in (optimizer, by_hand):
            one.step()
            one.zero_grad()
        losses.append((pair[0].item(), pair[1].item()))
    expect_close(*zip(*losses, strict=True))


@case(ranks=2)
def overflow_in_one_part_of_a_layer(folder: Path) -> None:
    accelerator, model, optimizer = _tensor_parallel(
        mixed_precision="fp16", kwargs_handlers=[training_cases.SCALING]
    )
    (batch,) = accelerator.prepare(gpt.loader(4, 1))
    check_skipped(accelerator, optimizer, lambda: gpt.loss_of(model, batch))


class Attends(nn.Module):
    """Predicts the next token; it gets the places of its tokens, of which each rank may have a part."""

    def __init__(self, length: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(32, width), nn.Embedding(length, width)
        self.mixed, self.out, self.head = (nn.Linear(width, size) for size in (3 * width, width, 32))

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places(places)
        parts = self.mixed(hidden).chunk(3, -1)
        queries, keys, values = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        logits: torch.Tensor = self.head(hidden + self.out(seen.transpose(1, 2).flatten(2)))
        return logits


@case(ranks=2, cuda=True)
def context_parallel(folder: Path) -> None:
    length, config = 256, ParallelismConfig(cp_size=2)
    tokens = torch.randint(32, (2, length + 1), generator=torch.Generator().manual_seed(4))
    accelerator = make(parallelism_config=config, fsdp_plugin=plugin(), mixed_precision="bf16")
    device = accelerator.device
    torch.manual_seed(1)
    built = Attends(length)
    torch.manual_seed(1)
    alone = Attends(length).to(device)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
    by_hand = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(built, optimizer)
    losses = []
    for _ in range(3):
        x, y = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
        place = torch.arange(length, device=device).repeat(2, 1)
        with torch.autocast("cuda", torch.bfloat16):
            expected = F.cross_entropy(alone(x, place).flatten(0, 1).float(), y.flatten())
        expected.backward()
        buffers = [x.clone(), y.clone(), place.clone()]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            logits = model(buffers[0], buffers[2])
            assert logits.shape[1] == length // 2
            loss = F.cross_entropy(logits.flatten(0, 1).float(), buffers[1].flatten())
            accelerator.backward(loss)
        for one in (optimizer, by_hand):
            one.step()
            one.zero_grad()
        losses.append((float(accelerator.reduce(loss.detach(), "mean")), expected.item()))
    expect_close(*zip(*losses, strict=True), relative=2**-6)


@case(ranks=1, cuda=True)
def weights_sent_in_float8(folder: Path) -> None:
    accelerator = make()
    if not probes.is_available("torchao"):
        raise Unavailable("needs torchao")
    own = torch.cuda.get_device_capability(accelerator.device)
    if own < (8, 9):
        raise Unavailable(f"needs compute capability 8.9, this device has {own[0]}.{own[1]}")
    losses = {}
    for precision in ("bf16", "fp8"):
        handlers = [AORecipeKwargs(enable_fsdp_float8_all_gather=True)] if precision == "fp8" else []
        accelerator = make(mixed_precision=precision, kwargs_handlers=handlers, fsdp_plugin=plugin())
        torch.manual_seed(1)
        built = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        optimizer = torch.optim.AdamW(built.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(built, optimizer)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).to(accelerator.device)
        losses[precision] = []
        for _ in range(STEPS):
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[precision].append(loss.item())
    assert all(map(math.isfinite, losses["fp8"]))
    expect_close(losses["fp8"], losses["bf16"], 0.1)
