"""DeepSpeed in a cell: a cell that trains by DistributedDataParallel trains by DeepSpeed with one argument more."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator

import pytest

from tests.notebooks.kernel import Cell, Kernel

# an import would take this process seconds, even where these tests are not chosen
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.skipif(not HAS_DEEPSPEED, reason="the extra deepspeed is not installed"),
]

SETUP = """
import sys, torch
from notebook_accel import Accelerator, DeepSpeedPlugin, notebook_launcher

def train(plugin=None):
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(160, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    stage = accelerator.deepspeed_plugin and accelerator.deepspeed_plugin.zero_stage
    return type(model).__name__, stage, losses
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has defined `train`, with a file that configures ZeRO 3."""
    folder = tmp_path_factory.mktemp("deepspeed")
    (folder / "zero3.json").write_text(
        '{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}'
    )
    (folder / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\nuse_cpu: true\n"
        "deepspeed_config:\n  deepspeed_config_file: zero3.json\n"
    )
    started = Kernel(folder, HF_HOME=str(folder), CUDA_VISIBLE_DEVICES="")
    started.run(SETUP).ok()
    yield started
    started.close()


def result(cell: Cell) -> tuple[str, int | None, list[float]]:
    name, stage, losses = ast.literal_eval(cell.ok().value)
    return name, stage, losses


def test_one_argument_makes_a_cell_one_of_deepspeed(kernel: Kernel) -> None:
    """By fork with a plugin, by fresh processes with a config; the notebook itself imports no DeepSpeed."""
    name, stage, expected = result(kernel.run("notebook_launcher(train, num_processes=2)"))
    assert (name, stage) == ("DistributedDataParallel", None) and expected[-1] < expected[0] / 2
    cell = kernel.run(
        "notebook_launcher(train, (DeepSpeedPlugin(zero_stage=2),), num_processes=2, start_method='fork')",
        240,
    )
    name, stage, losses = result(cell)
    assert (name, stage) == ("DeepSpeedEngine", 2) and losses == pytest.approx(expected, abs=1e-5)
    assert not [line for line in cell.lines if "DeepSpeed" in line] and "torch.distributed" not in cell.stderr
    cell = kernel.run("notebook_launcher(train, config='zero3.yaml', start_method='fresh')", 240)
    name, stage, losses = result(cell)
    assert (name, stage) == ("DeepSpeedEngine", 3) and losses == pytest.approx(expected, abs=1e-5)
    assert kernel.run("'deepspeed' in sys.modules").value == "False"


def test_a_contradiction_stops_before_anything_starts(kernel: Kernel) -> None:
    cell = kernel.run(
        "notebook_launcher(train, (DeepSpeedPlugin('zero3.json', zero_stage=2),), num_processes=2)"
    )
    assert cell.error is not None and "zero_stage=2 != 3" in cell.error[1] and cell.lines == []
    cell = kernel.run(
        "notebook_launcher(train, config='zero3.yaml', environment={'ACCELERATE_DEEPSPEED_ZERO_STAGE': '1'})"
    )
    assert cell.error is not None and "zero_stage=1 != 3" in cell.error[1] and "Launching" not in cell.stdout


def test_one_process_is_the_notebooks_own(kernel: Kernel) -> None:
    """Its process group is closed in the end, so that the next cell may have another."""
    _, _, expected = result(kernel.run("notebook_launcher(train, num_processes=1)"))
    for stage in (3, 2):
        cell = kernel.run(
            f"notebook_launcher(train, (DeepSpeedPlugin(zero_stage={stage}),), num_processes=1)", 240
        )
        assert result(cell) == ("DeepSpeedEngine", stage, pytest.approx(expected, abs=1e-5))
    left = kernel.run("torch.distributed.is_initialized(), os.environ.get('LOCAL_RANK')")
    assert left.value == "(False, None)"
