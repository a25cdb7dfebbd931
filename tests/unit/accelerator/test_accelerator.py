"""The accelerator: preparation, training and collecting, alone and on two processes."""

from __future__ import annotations

import importlib
import inspect
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel.accelerator import Accelerator
from notebook_accel.big_modeling import dispatch_model
from notebook_accel.data_loader import DataLoaderConfiguration
from notebook_accel.handlers import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from notebook_accel.optimizer import AcceleratedOptimizer
from notebook_accel.scheduler import AcceleratedScheduler
from notebook_accel.state import AcceleratorState, PartialState
from tests.unit.multiprocess import do_without_deepspeed, run_ranks


def make_parts(samples: int = 12, batch_size: int = 2, shuffle: bool = False) -> tuple[Any, Any, Any, Any]:
    """Return model, optimizer, loader and scheduler, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(
        torch.randn(samples, 3, generator=generator), torch.arange(samples, dtype=torch.float32).unsqueeze(1)
    )
    loader = DataLoader(
        data, batch_size=batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(7)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, loader, scheduler


def train(accelerator: Any, parts: tuple[Any, ...], epochs: int = 2) -> list[float]:
    """Train and return the weights."""
    model, optimizer, loader, scheduler = parts
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y / 10))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    model = accelerator.unwrap_model(model)
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


# --- one process -------------------------------------------------------------------------------------------------


def test_prepare_takes_anything_in_any_order(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = make_parts()
    second = torch.optim.Adam(model.parameters())
    prepared = accelerator.prepare(scheduler, loader, "text", second, optimizer, model)
    assert isinstance(prepared, tuple) and len(prepared) == 6
    assert prepared[2] == "text" and prepared[5] is model
    assert isinstance(prepared[0], AcceleratedScheduler) and prepared[0].optimizers == [prepared[4]]
    assert isinstance(prepared[3], AcceleratedOptimizer) and prepared[4].optimizer is optimizer
    again = accelerator.prepare(*prepared)
    assert all(a is b for a, b in zip(again, prepared, strict=True))
    assert accelerator.prepare(model) is model
    assert (
        len(accelerator._models) == 1
        and len(accelerator._optimizers) == 2
        and len(accelerator._dataloaders) == 1
    )


def test_a_subclass_prepares_models_itself(clean_runtime: None) -> None:
    class Frozen(Accelerator):
        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, torch.nn.Bilinear):
                return model
            return torch.nn.Sequential(super().prepare_model(model.requires_grad_(False), *args, **kwargs))

    accelerator = Frozen(cpu=True, mixed_precision="bf16")
    teacher = torch.nn.Bilinear(2, 2, 2)
    model, optimizer, same = accelerator.prepare(*make_parts()[:2], teacher)
    assert isinstance(model, torch.nn.Sequential) and isinstance(optimizer, AcceleratedOptimizer)
    assert model(torch.ones(1, 3)).dtype == torch.float32 and not model[0].weight.requires_grad
    assert same is teacher and same.forward.__func__ is torch.nn.Bilinear.forward
    assert accelerator._models == [model[0]]


def test_the_optimizer_keeps_pointing_at_the_models_parameters(clean_runtime: None) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        accelerator = Accelerator(cpu=True)
        accelerator._runtime.device = torch.device("meta")
        model, optimizer, *_ = make_parts()
        optimizer.state[next(model.parameters())]["kept"] = 1
        before = list(model.parameters())
        prepared, wrapped = accelerator.prepare(model, optimizer, device_placement=[True, False])
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    after = list(prepared.parameters())
    assert after[0] is not before[0] and after[0].device.type == "meta"
    assert all(a is b for a, b in zip(wrapped.param_groups[0]["params"], after, strict=True))
    assert wrapped.state[after[0]] == {"kept": 1}


def test_an_optimizer_that_was_prepared_before_follows_too(clean_runtime: None) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        accelerator = Accelerator(cpu=True)
        accelerator._runtime.device = torch.device("meta")
        model, optimizer, *_ = make_parts()
        early = accelerator.prepare(optimizer, device_placement=[False])
        late = torch.optim.LBFGS(model.parameters(), lr=0.1)  # has a list of its own
        model = accelerator.prepare(model)
        late = accelerator.prepare_optimizer(late, device_placement=False)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    for wrapped in (early, late):
        pairs = zip(wrapped.param_groups[0]["params"], model.parameters(), strict=True)
        assert all(a is b and a.device.type == "meta" for a, b in pairs)
    assert late.optimizer._params is late.param_groups[0]["params"]


def test_layers_that_share_weights_share_them_on_the_device(clean_runtime: None) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        accelerator = Accelerator(cpu=True)
        accelerator._runtime.device = torch.device("meta")
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, wrapped = accelerator.prepare(model, optimizer)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert model[1].weight is model[0].weight and model[0].weight.device.type == "meta"
    assert wrapped.param_groups[0]["params"][0] is model[0].weight
    assert len(wrapped.param_groups[0]["params"]) == 3


def test_device_placement_counts(clean_runtime: None) -> None:
    with pytest.raises(ValueError, match="1 items for 2 objects"):
        Accelerator(cpu=True).prepare(1, 2, device_placement=[True])


def test_single_process_training_is_torchs_own(clean_runtime: None) -> None:
    model, optimizer, loader, scheduler = make_parts(shuffle=True)
    for _ in range(2):
        for x, y in loader:
            mse_loss(model(x), y / 10).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    wanted = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    accelerator = Accelerator(cpu=True)
    assert train(accelerator, accelerator.prepare(*make_parts(shuffle=True))) == wanted


@pytest.mark.parametrize(
    ("samples", "steps"), [(12, [False, True] * 3), (10, [False, True, False, True, True])]
)
def test_accumulation_ends_with_the_loader(clean_runtime: None, samples: int, steps: list[bool]) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    parts = accelerator.prepare(*make_parts(samples))
    seen = []
    for x, _ in parts[2]:
        with accelerator.accumulate(parts[0]):
            accelerator.backward(parts[0](x).sum())
            seen.append(accelerator.sync_gradients)
            before = parts[0].weight.detach().clone()
            parts[1].step()
            assert torch.equal(before, parts[0].weight) != accelerator.sync_gradients
            parts[1].zero_grad()
    assert seen == steps


def test_accumulation_settings(clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert accelerator.gradient_accumulation_steps == 3
    assert not accelerator.gradient_state.sync_with_dataloader
    accelerator.gradient_accumulation_steps = 5
    assert accelerator.gradient_state.num_steps == 5
    with pytest.raises(ValueError, match="both given"):
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="num_steps=0: at least 1"):
        GradientAccumulationPlugin(num_steps=0)
    wrong: Any
    for wrong, error in (
        (0, ValueError),
        (-1, ValueError),
        ("3", TypeError),
        (2.5, TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match=f"gradient_accumulation_steps='?{wrong}"):
            accelerator.gradient_accumulation_steps = wrong
    assert accelerator.gradient_accumulation_steps == 5
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 4


def test_backward_divides_by_the_steps(clean_runtime: None) -> None:
    value = torch.ones(1, requires_grad=True)
    Accelerator(cpu=True, gradient_accumulation_steps=4).backward((value * 8).sum())
    assert value.grad is not None and value.grad.item() == 2


def test_clipping(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    value = torch.ones(2, requires_grad=True)
    (value * 3).sum().backward()
    assert accelerator.clip_grad_norm_([value], 1.0).item() == pytest.approx(18**0.5)
    assert value.grad is not None and value.grad.norm().item() == pytest.approx(1, abs=1e-4)
    accelerator.clip_grad_value_([value], 0.1)
    assert value.grad.tolist() == pytest.approx([0.1, 0.1])


def test_collecting_alone(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.reduce(torch.ones(2)).tolist() == [1, 1]
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


def test_one_process_drops_what_a_collate_fn_pads_too(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)

    def pad(rows: list[int]) -> torch.Tensor:
        return torch.tensor((rows + [-1] * 4)[:4])

    loader = accelerator.prepare(DataLoader(list(range(10)), batch_size=4, collate_fn=pad))  # type: ignore[arg-type]
    for batch in loader:
        tensors, loss = accelerator.gather_for_metrics((batch, batch.sum()))
        objects = accelerator.gather_for_metrics([str(value) for value in batch.tolist()])
        as_objects = accelerator.gather_for_metrics(batch, use_gather_object=True)
        sum_as_object = accelerator.gather_for_metrics(batch.sum(), use_gather_object=True)
        text = accelerator.gather_for_metrics("one object")
    assert (tensors.tolist(), objects) == ([8, 9], ["8", "9"])
    assert as_objects.tolist() == [8, 9]
    assert loss.ndim == sum_as_object.ndim == 0 and text == "one object", "no samples to count"


def test_free_memory(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*make_parts())
    gone = weakref.ref(model)
    assert accelerator.free_memory(model, optimizer, loader, scheduler) == [None] * 4
    del model, optimizer, loader, scheduler
    accelerator.clear()
    assert gone() is None


def test_a_second_accelerator(clean_runtime: None) -> None:
    PartialState(cpu=True)
    first = Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16" and AcceleratorState().mixed_precision == "bf16"
    assert Accelerator(mixed_precision="bf16").device == first.device
    with pytest.raises(
        ValueError, match=r"mixed_precision='no' comes too late: the first Accelerator chose 'bf16'"
    ):
        Accelerator(mixed_precision="no")


def test_what_is_not_supported_is_refused(clean_runtime: None) -> None:
    with pytest.raises(NotImplementedError, match=r"Megatron-LM is not supported: train with"):
        Accelerator(cpu=True, megatron_lm_plugin="x")
    for name in ("fsdp_plugin", "parallelism_config", "torch_tp_plugin"):
        unsupported: dict[str, Any] = {name: "x"}
        with pytest.raises(TypeError, match=f"{name} must be a "):
            Accelerator(cpu=True, **unsupported)
    with pytest.raises(ValueError, match="rng_types"):
        Accelerator(cpu=True, rng_types=["dice"])
    with pytest.raises(ValueError, match="more than one GradScalerKwargs"):
        Accelerator(cpu=True, kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()])
    with pytest.raises(ValueError, match="kwargs_handlers takes"):
        Accelerator(cpu=True, kwargs_handlers=["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="split_batches"):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration())
    assert Accelerator(cpu=True, split_batches=True).split_batches


def test_parameters_are_those_of_accelerate() -> None:
    reference = pytest.importorskip("accelerate").Accelerator
    ours, theirs = (list(inspect.signature(kind.__init__).parameters) for kind in (Accelerator, reference))
    assert ours == theirs
    methods = [
        name
        for name, member in vars(reference).items()
        if not name.startswith("_") and inspect.isfunction(member) and hasattr(Accelerator, name)
    ]
    assert len(methods) > 35
    hidden = {  # behind a decorator of the reference that shows *args and **kwargs
        "init_trackers": ["self", "project_name", "config", "init_kwargs"],
        "log": ["self", "values", "step", "log_kwargs"],
    }
    for name, names in hidden.items():
        assert list(inspect.signature(getattr(Accelerator, name)).parameters) == names
    for name in sorted(set(methods) - set(hidden)):
        parameters = inspect.signature(getattr(Accelerator, name)).parameters
        more = {"save_state": ["async_save"], "prepare_data_loader": ["already_sharded"]}.get(name, [])
        assert all(parameters[extra].kind is inspect.Parameter.KEYWORD_ONLY for extra in more)
        theirs = list(inspect.signature(getattr(reference, name)).parameters)
        assert [given for given in parameters if given not in more] == theirs, name


# --- two processes -----------------------------------------------------------------------------------------------


def ranks_train(accumulate: int, mixed_precision: str, shuffle: bool) -> tuple[list[float], bool]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=mixed_precision)
    parts = accelerator.prepare(*make_parts(shuffle=shuffle))
    return train(accelerator, parts), isinstance(parts[0], DistributedDataParallel)


def ranks_train_as_accelerate(accumulate: int, mixed_precision: str, shuffle: bool) -> list[float]:
    warnings.simplefilter("ignore")
    do_without_deepspeed()
    kind = importlib.import_module("accelerate").Accelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=mixed_precision)
    assert accelerator.num_processes == 2
    return train(accelerator, accelerator.prepare(*make_parts(shuffle=shuffle)))


def ranks_train_both(*arguments: Any) -> tuple[Any, Any]:
    return ranks_train(*arguments), ranks_train_as_accelerate(*arguments)


@pytest.mark.parametrize("arguments", [(1, "no", False), (2, "no", True), (2, "bf16", False)])
def test_training_gives_accelerates_weights(arguments: tuple[Any, ...]) -> None:
    pytest.importorskip("accelerate")
    for (ours, is_wrapped), theirs in run_ranks(ranks_train_both, *arguments):
        assert is_wrapped and ours == pytest.approx(theirs, rel=1e-6)


def test_two_processes_train_as_one_with_twice_the_batch(clean_runtime: None) -> None:
    (first, _), (second, _) = run_ranks(ranks_train, 1, "no", False)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = accelerator.prepare(*make_parts(batch_size=4))
    steps = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)  # two processes step the schedule twice
    alone = train(accelerator, (model, optimizer, loader, steps))
    assert first == second == pytest.approx(alone, rel=1e-5)


def ranks_metrics() -> dict[str, Any]:
    accelerator = Accelerator()
    seen: dict[str, Any] = {}
    for samples in (12, 9, 5):
        loader = accelerator.prepare(make_parts(samples)[2])
        tensors: list[float] = []
        objects: list[Any] = []
        for _, y in loader:
            tensors += accelerator.gather_for_metrics({"y": [y]})["y"][0].flatten().tolist()
            objects += accelerator.gather_for_metrics([str(value) for value in y.flatten().tolist()])
        seen[f"tensors {samples}"], seen[f"objects {samples}"] = tensors, objects
    forced = accelerator.gather_for_metrics(
        [torch.ones(1 + accelerator.process_index)], use_gather_object=True
    )
    seen["forced"] = [len(tensor) for tensor in forced]
    return seen


def test_gather_for_metrics_drops_what_fills_the_last_batch_up() -> None:
    for seen in run_ranks(ranks_metrics):
        for samples in (12, 9, 5):
            assert seen[f"tensors {samples}"] == [float(i) for i in range(samples)]
            assert seen[f"objects {samples}"] == [str(float(i)) for i in range(samples)]
        assert seen["forced"] == [1, 2]


def ranks_sync() -> dict[str, Any]:
    accelerator = Accelerator(
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, comm_hook="fp16"),  # type: ignore[arg-type]
            InitProcessGroupKwargs(),
        ]
    )
    rank = accelerator.process_index
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    wrapped, same, evaluated = (
        accelerator.prepare(model),
        accelerator.prepare(frozen),
        accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True),
    )
    assert wrapped.gradient_as_bucket_view and same is frozen
    assert isinstance(evaluated, torch.nn.Linear)
    seen: dict[str, Any] = {"repeated": accelerator.prepare(wrapped) is wrapped}
    x = torch.full((1, 1), float(1 + rank))
    with accelerator.no_sync(wrapped):
        accelerator.backward(wrapped(x).sum())
        seen["local"] = model.weight.grad.item()
        loss = wrapped(x).sum()
    with accelerator.trigger_sync_in_backward(wrapped):
        accelerator.backward(loss)
    seen["synced"] = model.weight.grad.item()
    seen["unwrapped"] = accelerator.unwrap_model(wrapped) is model
    seen["names"] = list(accelerator.get_state_dict(wrapped))
    if rank:
        accelerator.set_trigger()
    seen["trigger"] = accelerator.check_trigger()
    seen["padded"] = accelerator.pad_across_processes(torch.ones(1 + rank)).tolist()
    seen["mean"] = accelerator.reduce(torch.tensor(float(rank)), "mean").item()
    return seen


def test_gradient_synchronisation() -> None:
    first, second = run_ranks(ranks_sync)
    for rank, seen in enumerate((first, second)):
        assert seen["repeated"] and seen["unwrapped"] and seen["names"] == ["weight"] and seen["trigger"]
        assert (seen["local"], seen["synced"], seen["mean"]) == (1 + rank, 3.0, 0.5)
    assert (first["padded"], second["padded"]) == ([1, 0], [1, 1])


def ranks_even_for_a_while(dispatch: bool) -> tuple[list[list[int]], list[str]]:
    """Return the lengths of loaders before, in and after a block that does not even them, and the warnings."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    numbers: Any = range(5)
    prepared: list[Any] = [
        accelerator.prepare(DataLoader(numbers, batch_size=1)),
        accelerator.prepare(DataLoader(numbers, batch_size=None)),
    ]
    if dispatch:
        accelerator.dataloader_config = DataLoaderConfiguration(dispatch_batches=True)
        prepared.append(accelerator.prepare(DataLoader(numbers, batch_size=1)))
    lengths = [[len(loader) for loader in prepared]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            lengths.append([len(loader) for loader in prepared])
    lengths.append([len(loader) for loader in prepared])
    return lengths, [str(warning.message) for warning in caught if warning.filename == __file__]


def test_joining_evens_every_loader_that_is_shared_out() -> None:
    for dispatch in (False, True):
        first, second = run_ranks(ranks_even_for_a_while, dispatch)
        more = [3] * dispatch
        assert first[0] == [[3, 3, *more]] * 3
        assert second[0] == [[3, 3, *more], [2, 2, *more], [3, 3, *more]]
        assert first[1] == second[1] and len(first[1]) == dispatch
        assert all("1 of the 3 prepared loaders" in message for message in first[1])


def ranks_evened(split: bool) -> int:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
    loader = accelerator.prepare(make_parts(samples=8)[2])
    return len(list(loader))


def test_the_loader_config_arrives() -> None:
    assert run_ranks(ranks_evened, True) == [4, 4]
    assert run_ranks(ranks_evened, False) == [2, 2]


@pytest.mark.parametrize("trained", [True, False])
def test_offloaded_weights_that_no_optimizer_reaches_are_told(
    tmp_path: Path, clean_runtime: None, trained: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).requires_grad_(trained)
    dispatch_model(model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=tmp_path)
    Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    told = [str(one.message) for one in recwarn if "are offloaded" in str(one.message)]
    assert [text.partition(":")[0] for text in told] == (
        ["2 of 4 weights of SGD are offloaded, and an optimizer does not reach them"] if trained else []
    )
