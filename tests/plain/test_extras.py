"""Each extra that users install works without the others."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.plain.plain import PLAIN, find_python, run
from tests.structure.source import ROOT

IMPORT_FOR_TUTORIALS = """
import ast
import importlib
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

found = set()
for path in Path(FOLDER).glob("*.ipynb"):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module)
assert {"sklearn.datasets", "matplotlib.pyplot", "PIL"} <= found
for name in sorted(found):
    if not name.startswith("torch_xla"):  # of the extra xla, which has another torch
        importlib.import_module(name)
"""
TRAIN_BY_DEEPSPEED = """
import torch
from notebook_accel import Accelerator, notebook_launcher
from notebook_accel.utils import DeepSpeedPlugin


def train():
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1))
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    return type(model).__name__


assert notebook_launcher(train, num_processes=2) == "DeepSpeedEngine"
"""
LAUNCH_ON_RAY = """
import ray
import torch
from notebook_accel import Accelerator, notebook_launcher


def gather_ranks():
    accelerator = Accelerator()
    return accelerator.gather(torch.tensor([accelerator.process_index])).tolist()


ray.init(num_cpus=2, include_dashboard=False)
assert notebook_launcher(gather_ranks, num_processes=2, engine="ray") == [0, 1]
"""
RESUME_A_STATEFUL_LOADER = """
import torch
from notebook_accel import Accelerator, DataLoaderConfiguration


def make():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    return accelerator, accelerator.prepare(torch.utils.data.DataLoader(torch.arange(6), batch_size=2))


accelerator, loader = make()
next(iter(loader))
accelerator.save_state("saved")
accelerator, loader = make()
accelerator.load_state("saved")
assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]
"""
PROGRAMS = {
    "deepspeed": TRAIN_BY_DEEPSPEED,
    "ray": LAUNCH_ON_RAY,
    "stateful": RESUME_A_STATEFUL_LOADER,
    "tutorial": IMPORT_FOR_TUTORIALS.replace("FOLDER", repr(str(ROOT / "tutorials"))),
}


@pytest.mark.parametrize("extra", PROGRAMS)
def test_it_works_alone(tmp_path: Path, extra: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[extra])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:  # Ray leaves a folder with sockets
        done = run(tmp_path, "program.py", python=find_python(PLAIN / extra), TMPDIR=short)
    assert done.returncode == 0, done.stdout + done.stderr
