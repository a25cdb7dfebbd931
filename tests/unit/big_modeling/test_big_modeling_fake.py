"""Models that are larger than a device, on an accelerator of which the package has no row."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accel import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from notebook_accel.big_modeling.limits import get_balanced_memory, get_max_memory
from notebook_accel.hooks import remove_hook_from_submodules
from tests.unit import fake_cases, fake_device

WIDTH = 32
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes
COUNT = 3
LIMIT = 20 * LAYER


class Tower(nn.Module):
    """Layers one after the other; each sees the same input width."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = torch.tanh(layer(data))
        return data


def tower(count: int = 6) -> Tower:
    torch.manual_seed(0)
    return Tower(count)


def data() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def wait_for_fetches() -> None:
    for thread in threading.enumerate():
        if thread.name == "weights of the next module":
            thread.join()


def wait_after_each_layer(model: Tower) -> None:
    """Let the thread that fetches weights always be ahead by one layer."""
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: wait_for_fetches())


def used() -> list[int]:
    """Return the bytes in use of each device, when nothing is on its way."""
    wait_for_fetches()
    gc.collect()
    return list(fake_device.installed().memory.used)


@contextmanager
def filled(index: int, nbytes: int) -> Iterator[None]:
    """Leave a device less memory."""
    held = torch.empty(nbytes, dtype=torch.uint8, device=f"fake:{index}")
    yield
    del held


def check(model: nn.Module, like: nn.Module) -> None:
    """Check that a model computes what the other does, twice, on the device of its input."""
    wanted = like(data())
    for _ in range(2):
        with torch.no_grad():
            found = model(data())
        assert torch.allclose(found.cpu(), wanted, atol=1e-6)


def case_limits_are_what_is_free(folder: Path) -> None:
    with filled(1, LIMIT // 2):
        found = get_max_memory()
    assert list(found) == [0, 1, 2, "cpu"]
    assert [found[0], found[1]] == [int(LIMIT * 0.9), int(LIMIT // 2 * 0.9)]


def case_limits_of_devices_that_are_not_there(folder: Path) -> None:
    assert list(get_max_memory({2: "1GB", "cpu": "1GB"})) == [2, "cpu"]  # a warning would be an error here
    with pytest.warns(UserWarning, match=r"\[3\], and this machine has 3"):
        get_max_memory({3: "1GB"})
    with pytest.raises(ValueError, match=r"'fake:3'.*finds 3 fake devices"):
        dispatch_model(tower(), {"layers": "fake:3"})


def case_balanced(folder: Path) -> None:
    found = get_balanced_memory(tower(), {0: LIMIT, 1: LIMIT, 2: LIMIT})
    assert found[0] == found[1] < LIMIT and found[2] == LIMIT


def case_spread_over_devices(folder: Path) -> None:
    model = tower()
    limits: dict[int | str, int | str] = {0: 2 * LAYER, 1: 2 * LAYER, 2: 3 * LAYER}
    device_map = infer_auto_device_map(model, limits)
    assert set(device_map.values()) == {0, 1, 2}
    plain = copy.deepcopy(model)
    spread = dispatch_model(model, device_map)
    places = [next(layer.parameters()).device for layer in spread.layers]
    assert {place.type for place in places} == {"fake"} and len(set(places)) == 3
    check(spread, plain)
    with pytest.warns(UserWarning, match=r"model.fake\(\) moves parts"):
        spread.fake(0)


def case_offloaded_layers_come_to_the_device(folder: Path) -> None:
    plain = tower()
    before = used()
    model = dispatch_model(tower(), {f"layers.{i}": "cpu" if i % 2 else 0 for i in range(6)})
    assert used()[0] - before[0] == 3 * LAYER
    check(model, plain)
    assert used()[0] - before[0] == 3 * LAYER, "what came for the forward has gone"
    for move in ("to", "fake"):
        with pytest.raises(RuntimeError, match=rf"model.{move}\(\): parts of this model are on the CPU"):
            getattr(model, move)("fake:1")
    remove_hook_from_submodules(model)
    assert {p.device.type for p in model.layers[1].parameters()} == {"cpu"}


def case_weights_are_fetched_in_a_stream_of_their_own(folder: Path) -> None:
    kernels = fake_device.installed().kernels
    del kernels.recorded[:]
    model = cpu_offload(tower(), "fake:1")
    wait_after_each_layer(model)
    check(model, tower())
    assert kernels.recorded and {device for device, _ in kernels.recorded} == {torch.device("fake:1")}
    computing = fake_device.installed().current_stream()
    assert {stream for _, stream in kernels.recorded} == {computing} and computing.waited


def case_offload(folder: Path) -> None:
    peak = fake_device.installed().max_memory_allocated
    before = used()[2]
    fake_device.installed().reset_peak_memory_stats(2)
    for model in (cpu_offload(tower(12), 2), disk_offload(tower(12), folder, 2)):
        wait_after_each_layer(model)
        check(model, tower(12))
        assert peak(2) - before < 6 * LAYER
        assert used()[2] == before, (used()[2] - before) / LAYER


def case_models_one_after_the_other(folder: Path) -> None:
    first, hook = cpu_offload_with_hook(tower(), 0)
    second, other = cpu_offload_with_hook(tower(), 0, prev_module_hook=hook)
    before = used()[0]
    check(first, tower())
    assert used()[0] - before == 6 * LAYER
    check(second, tower())
    assert used()[0] - before == 6 * LAYER and next(first.parameters()).device.type == "cpu"
    other.offload()
    assert used()[0] == before


def write_checkpoint(folder: Path, count: int) -> str:
    path = folder / "model.safetensors"
    save_file(tower(count).state_dict(), path)
    return str(path)


def case_loaded_by_what_is_free(folder: Path) -> None:
    """Weights that fit go to devices, the rest to the CPU."""
    path = write_checkpoint(folder, 12)
    with init_empty_weights():
        model = Tower(12)
    with filled(0, LIMIT - 5 * LAYER), filled(1, LIMIT - 5 * LAYER), filled(2, LIMIT - 5 * LAYER):
        loaded = load_checkpoint_and_dispatch(model, path, device_map="sequential")
        assert {"cpu"} < {str(place) for place in loaded.hf_device_map.values()}
        check(loaded, tower(12))
    del loaded, model


def case_loaded_evenly(folder: Path) -> None:
    path = write_checkpoint(folder, 9)
    with init_empty_weights():
        model = Tower(9)
    loaded = load_checkpoint_and_dispatch(model, path, device_map="auto")
    shares = [used()[index] // LAYER for index in range(COUNT)]
    assert sum(shares) == 9 and max(shares) - min(shares) <= 2
    check(loaded, tower(9))


def case_a_checkpoint_loads_to_a_device(folder: Path) -> None:
    path = write_checkpoint(folder, 6)
    with init_empty_weights():
        model = Tower()
    loaded: Any = load_checkpoint_and_dispatch(model, path, device_map={"": "fake:1"})
    assert {p.device for p in loaded.parameters()} == {torch.device("fake:1")}
    check(loaded.to("cpu"), tower())


CASES = fake_cases.cases_of(globals())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> fake_cases.Outcomes:
    return fake_cases.run_cases(CASES, tmp_path_factory.mktemp("fake"), count=COUNT, limit=LIMIT)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_on_a_fake(case: fake_cases.Case, outcomes: fake_cases.Outcomes) -> None:
    outcomes.check(case)
