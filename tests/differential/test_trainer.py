"""Hugging Face's Trainer on two CPU processes: as under `accelerate launch`, with the same numbers and environment."""

from __future__ import annotations

import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import notebook_launcher, probes
from tests import forker
from tests.differential.test_launch_environment import CASES, differing
from tests.differential.test_scripts import WITHOUT_SLOW

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (Path(__file__).parent / "trainer_script.txt").read_text()
OURS = [sys.executable, "-m", "notebook_accel", "launch"]
THEIRS = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
MULTI_CPU = CASES["cpu"] + "gradient_accumulation_steps: 2\n"
FSDP = CASES["fsdp1"].replace("use_cpu: false", "use_cpu: true")
UNSYNCED = FSDP.replace("sync_module_states: true", "sync_module_states: false").replace(
    "ram_efficient_loading: true", "ram_efficient_loading: false"
)
ACCUMULATED = {"gradient_accumulation_steps": 2}
# Accelerate's command starts a single CPU process: torchrun's processes are told by hand what they run on
HAND = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
NO_DEVICE = "There are currently no available devices found"


PROBE = """
import json, os, sys, time
rank = int(os.environ["RANK"])
own, other = (f"{sys.argv[1]}-{one}.json" for one in (rank, 1 - rank))
with open(f"{own}.new", "w") as file:
    json.dump({"environment": dict(os.environ)}, file)
os.rename(f"{own}.new", own)
while not os.path.exists(other):  # the first that fails ends the other one
    time.sleep(0.01)
from accelerate import Accelerator
Accelerator()
"""


@dataclass(frozen=True)
class Done:
    """A run that has ended, with what each process wrote."""

    code: int
    errors: str
    reports: list[dict[str, Any]]


def environment() -> dict[str, str]:
    """Return the variables of all programs: nothing that steers them."""
    removed = ("ACCELERATE_", "FSDP_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(removed)}
    return {**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, name: str, command: list[str], **more: str) -> Done:
    """Run one of the scripts in the folder on two processes, without what this process's environment says."""
    script = ["train.py", name, json.dumps(ACCUMULATED)] if name.startswith("cpu") else ["probe.py", name]
    done = forker.run(
        [*command, *script],
        env={**environment(), "HF_HOME": str(folder), **more},
        cwd=folder,
        timeout=240,
    )
    files = [folder / f"{name}-{rank}.json" for rank in range(2)]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    return Done(code=done.returncode, errors=done.stderr, reports=reports)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """All runs by name, two at a time."""
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "train.py").write_text(WITHOUT_SLOW + SCRIPT)
    (folder / "probe.py").write_text(PROBE)
    for name, text in {"cpu": MULTI_CPU, "fsdp": FSDP}.items():
        (folder / f"{name}.yaml").write_text(text)
    by_flags = ["--multi_gpu", "--num_processes", "2", "--mixed_precision", "bf16"]
    runs: dict[str, tuple[list[str], dict[str, str]]] = {
        "cpu ours": ([*OURS, "--config_file", "cpu.yaml"], {}),
        "cpu theirs": ([*THEIRS, *by_flags], HAND),
        "fsdp ours": ([*OURS, "--config_file", "fsdp.yaml"], {}),
        "fsdp theirs": ([*THEIRS, "--config_file", "fsdp.yaml"], {}),
    }
    with forker.session(environment()), ThreadPoolExecutor(2) as pool:
        pending = {name: pool.submit(run, folder, name, words, **env) for name, (words, env) in runs.items()}
        return {name: future.result() for name, future in pending.items()}


def test_two_processes_train_one_model(done: dict[str, Done]) -> None:
    ours = done["cpu ours"]
    assert ours.code == 0, ours.errors
    first, second = ours.reports
    found = {"kind": "MULTI_CPU", "backend": "gloo", "world": 2, "wrapped": "DistributedDataParallel"}
    assert found.items() <= first.items() and found.items() <= second.items()
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["weights"] == second["weights"]
    assert first["losses"][-1] < first["losses"][0] / 2


def test_what_the_file_says_reaches_trainer(done: dict[str, Done]) -> None:
    report = done["cpu ours"].reports[0]
    assert report["precision"] == "bf16"
    assert report["steps"] == 256 // (2 * 8 * 2) * 4, "accumulated as Trainer's own arguments say"
    assert report["accumulation"] == [1, 2], (
        "Trainer accumulates by itself; another Accelerator as the file says"
    )


def test_the_numbers_are_those_of_accelerate_launch(done: dict[str, Done]) -> None:
    theirs = done["cpu theirs"]
    assert theirs.code == 0, theirs.errors
    assert done["cpu ours"].reports == theirs.reports


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_find_the_same_environment(done: dict[str, Done], rank: int) -> None:
    ours, theirs = (done[f"fsdp {side}"].reports[rank]["environment"] for side in ("ours", "theirs"))
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
    ):
        assert ours[name] == theirs[name], name
    reasons = {
        "the file says use_cpu: true": {"ACCELERATE_USE_CPU"},
        "nothing is compiled": {name for name in theirs if name.startswith("ACCELERATE_DYNAMO_")}
        - {"ACCELERATE_DYNAMO_BACKEND"},
        "Accelerate no longer reads the guide's name of it": {"FSDP_BACKWARD_PREFETCH"},
        "without a meaning beside the file's other options": {
            "FSDP_MIN_NUM_PARAMS",
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        },
        "a free port": {"MASTER_PORT"},
        "errors come by a socket": {"TORCHELASTIC_ERROR_FILE"},
        "gloo keeps to the loopback interface": {"GLOO_SOCKET_IFNAME"},
        "for reports of hangs": set() if probes.at_least("torch", "2.11") else {"TORCH_FR_BUFFER_SIZE"},
    }
    shell = {"_", "PWD", "OLDPWD", "SHLVL", "LC_CTYPE", "PYTHONPATH", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    names = {name for name in differing(ours, theirs) if name not in shell}
    expected = set().union(*reasons.values())
    assert names == expected, {name: (ours.get(name), theirs.get(name)) for name in names ^ expected}


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_fsdp_needs_a_device_in_accelerate_itself(done: dict[str, Done], side: str) -> None:
    """With rank 0's weights for all, which is what its guide asks for."""
    assert done[f"fsdp {side}"].code != 0
    assert f"RuntimeError: {NO_DEVICE}" in done[f"fsdp {side}"].errors


def plugin() -> dict[str, Any]:
    """Return what Accelerate makes of the environment, and of a model."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    made = FullyShardedDataParallelPlugin()
    names = ("fsdp_version", "sharding_strategy", "backward_prefetch", "state_dict_type", "use_orig_params")
    more = ("cpu_ram_efficient_loading", "sync_module_states", "transformer_cls_names_to_wrap")
    accelerator = Accelerator()
    told = {"kind": accelerator.distributed_type.value, "precision": accelerator.mixed_precision}
    wrapped = type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__
    return {name: str(getattr(made, name)) for name in (*names, *more)} | told | {"wrapped": wrapped}


@pytest.fixture
def unknown_to_accelerate() -> None:
    """Forget what Accelerate knows of this process: forks would take over what another test left."""
    state: Any = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


@pytest.mark.usefixtures("unknown_to_accelerate")
def test_a_launch_by_config_makes_the_plugin_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(UNSYNCED)
    assert notebook_launcher(plugin, config=path) == {
        "fsdp_version": "1",
        "sharding_strategy": "ShardingStrategy.FULL_SHARD",
        "backward_prefetch": "BackwardPrefetch.BACKWARD_PRE",
        "state_dict_type": "StateDictType.SHARDED_STATE_DICT",
        "use_orig_params": "True",
        "cpu_ram_efficient_loading": "False",
        "sync_module_states": "False",
        "transformer_cls_names_to_wrap": "['BertLayer']",
        "precision": "bf16",
        "kind": "MULTI_CPU",  # only processes with devices are made FSDP's
        "wrapped": "DistributedDataParallel",
    }
    path.write_text(FSDP)
    with pytest.raises(RuntimeError, match=NO_DEVICE):
        notebook_launcher(plugin, config=path)


@pytest.mark.usefixtures("unknown_to_accelerate")
def test_the_second_version_shards_nothing_on_cpus_either(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CASES["fsdp2"].replace("use_cpu: false", "use_cpu: true"))
    found = notebook_launcher(plugin, config=path)
    assert (found["fsdp_version"], found["state_dict_type"]) == ("2", "StateDictType.FULL_STATE_DICT")
    assert (found["kind"], found["wrapped"]) == ("MULTI_CPU", "DistributedDataParallel")
