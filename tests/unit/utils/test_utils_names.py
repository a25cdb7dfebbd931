"""Smaller functions under Accelerate's names give what Accelerate's give."""

from __future__ import annotations

from typing import Any

import accelerate.utils as reference
import accelerate.utils.ao as reference_ao
import pytest
import torch
from accelerate.utils import environment as reference_environment
from torch import nn

from notebook_accel import PartialState
from notebook_accel.utils import fsdp, launch, layers, machine, operations
from tests.unit.multiprocess import run_ranks

RANKS = (
    "RANK",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PMI_SIZE",
    "LOCAL_WORLD_SIZE",
)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PMI_RANK": "5"},
        {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"},
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
def test_the_place_of_a_process(values: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, text in values.items():
        monkeypatch.setenv(name, text)
    ours, theirs = machine.get_cpu_distributed_information(), reference.get_cpu_distributed_information()
    assert vars(ours) == vars(theirs)


def test_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    assert machine.get_current_device_type() == reference_environment.get_current_device_type()
    assert machine.check_cuda_p2p_ib_support() == reference.check_cuda_p2p_ib_support()
    values = {"A": "1", "B": "a b", "": "x", "C": "", "D": "x;y", "E": "/tmp"}
    ours = machine.convert_dict_to_env_variables(values)
    assert ours == reference.convert_dict_to_env_variables(values) == ["A=1\n", "E=/tmp\n"]
    assert "D=x;y is left out" in caplog.text


SMI = """#!/bin/sh
case "$1" in
    *name*) printf '%s\\n' "$NAMES" | tr , '\\n' ;;
    *driver*) echo "$DRIVER" ;;
    *) echo 8.9 ;;
esac
"""


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        ("NVIDIA GeForce RTX 4090,NVIDIA GeForce RTX 4090", "535.1", False),
        ("NVIDIA GeForce RTX 4090,NVIDIA GeForce RTX 4090", "560.1", True),
        ("NVIDIA GeForce RTX 4090", "535.1", True),
        ("NVIDIA A100,NVIDIA A100", "535.1", True),
    ],
)
def test_gpus_that_cannot_send_to_each_other(
    names: str, driver: str, expected: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("NAMES", names)
    monkeypatch.setenv("DRIVER", driver)
    assert machine.get_gpu_info() == (names.split(","), len(names.split(",")))
    assert machine.get_driver_version() == driver
    assert machine.check_cuda_p2p_ib_support() is expected


@pytest.mark.parametrize(("capability", "expected"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_that_compute_in_float8(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert machine.check_cuda_fp8_capability() is expected


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 7, 8, 15, 16, 17, 20, 21])
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_padded_inputs(batch_size: int, num_processes: int) -> None:
    data = {"a": torch.rand(batch_size, 3), "b": [torch.ones(batch_size, dtype=torch.long)]}
    try:
        theirs = reference.pad_input_tensors(data, batch_size, num_processes)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            operations.pad_input_tensors(data, batch_size, num_processes)
        return
    ours = operations.pad_input_tensors(data, batch_size, num_processes)
    assert torch.equal(ours["a"], theirs["a"]) and torch.equal(ours["b"][0], theirs["b"][0])


def test_layers() -> None:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 17), nn.Linear(16, 16), nn.Linear(16, 16)
    )
    for one in (model, nn.ReLU()):
        ends = reference_ao.find_first_last_linear_layers(one)
        assert layers.find_first_last_linear_layers(one) == ends
    for name, module in model.named_modules():
        for theirs, ours in (
            (
                reference_ao.filter_linear_layers(module, name, ["0"]),
                layers.filter_linear_layers(module, name, ["0"]),
            ),
            (
                reference_ao.filter_first_and_last_linear_layers(module, name),
                layers.filter_first_and_last_linear_layers(module, name),
            ),
        ):
            assert ours == theirs, name
    assert layers.get_parameter_device(model) == torch.device("cpu")


def test_float8_layers() -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    assert not layers.has_ao_layers(model)
    layers.convert_model_to_fp8_ao(model)
    assert layers.has_ao_layers(model)
    assert [type(layer) is nn.Linear for layer in model] == [True, False, True]


@pytest.mark.parametrize("ensure", [reference.ensure_weights_retied, fsdp.ensure_weights_retied])
def test_weights_that_were_one_are_one_again(ensure: Any) -> None:
    def build() -> Any:
        model: Any = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    def make(module: nn.Module) -> nn.Module:
        return module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        model = build()
    assert ensure(make, model, torch.device("cpu")) is make
    model._tied_weights_keys = {"1.weight": "0.weight"}
    init = ensure(make, model, torch.device("cpu"))
    for module in model:
        init(module)
    assert model[0].weight is model[1].weight and not model[2].weight.is_meta


def test_names_without_wrappers() -> None:
    names = dict.fromkeys(
        (
            "_orig_mod.a.weight",
            "a._orig_mod.b",
            "a._checkpoint_wrapped_module.b.weight",
            "_orig_mod.l._checkpoint_wrapped_module._orig_mod.w",
            "plain",
        ),
        1,
    )
    assert fsdp.fsdp2_canonicalize_names(names) == reference.fsdp2_canonicalize_names(names)


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU"])
def test_a_process_of_the_users_launcher(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, prepare in (("theirs", reference.PrepareForLaunch), ("ours", launch.PrepareForLaunch)):
        with monkeypatch.context() as context:
            for variable in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED"):
                context.setenv(variable, "unset")
            context.setenv("NPROC", "4")
            context.setenv("NODE_RANK", "2")
            seen: list[Any] = []
            prepare(lambda *args, seen=seen: seen.append((args, ranks())), kind)(1, "a", 2)
            found[name] = seen
    assert found["ours"] == found["theirs"]
    assert found["ours"][0][1]["RANK"] == ("9" if kind == "MULTI_CPU" else "unset")


def ranks() -> dict[str, str]:
    import os

    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")}


def copy() -> list[Any]:
    has_it = PartialState().process_index == 1
    mine = torch.arange(6.0).reshape(2, 3) if has_it else None
    found: list[Any] = operations.copy_tensor_to_devices(mine).tolist()
    return found


def test_a_tensor_that_one_process_has() -> None:
    assert run_ranks(copy) == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2
