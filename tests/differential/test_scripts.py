"""One training script, by torchrun, alone and from a notebook cell: the same numbers as with Accelerate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from notebook_accel.launch.checks import compiler_preload
from tests import forker
from tests.differential.harness import OURS, REFERENCE, differences
from tests.notebooks.kernel import ROOT, Kernel, make_event_loop

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")
pytestmark = [pytest.mark.notebook, pytest.mark.slow]

SCRIPT = (Path(__file__).parent / "digits_script.txt").read_text()
# Accelerate imports it to look at any model, for seconds
WITHOUT_DEEPSPEED = "import sys\n\nsys.modules['deepspeed'] = None\n"
# Transformers imports them for quantized models and for losses of detection, for seconds too
WITHOUT_SLOW = WITHOUT_DEEPSPEED + "sys.modules['torchao'] = sys.modules['scipy'] = None\n"
# without it the script hangs at its end now and then: DistributedDataParallel must not be the last that has the group;
# or it is aborted there, where torch takes the group apart
KEEPS_GROUP = """
import atexit, os, sys
from torch import distributed


@atexit.register
def leave_at_once():  # after all other handlers
    if getattr(sys, "last_value", None) is None:  # nothing was raised
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


kept, destroy = [], distributed.destroy_process_group


def keep_and_destroy(group=None):
    kept.append(distributed.group.WORLD)
    destroy(group)


distributed.destroy_process_group = keep_and_destroy
"""
LIBRARIES = [compiler_preload.MODULE, "torch.utils.tensorboard"]  # of each script, for seconds
READ_BY_TORCH = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
CHECKPOINT = 6  # batches, in the middle of the first epoch and after an optimizer step
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# a loader that starts draws a number from torch: in the middle of an epoch, dropout would be another after a resume
ALONE = {"mixed_precision": "bf16", "dropout": 0.0}
FULL = [("torchrun", REFERENCE), ("torchrun", OURS), ("alone", REFERENCE), ("alone", OURS)]


@dataclass(frozen=True)
class Scripts:
    """Runs of the script in folders of their own below one folder."""

    folder: Path

    def project(self, name: str) -> Path:
        return self.folder / name

    def options(self, name: str, **more: Any) -> dict[str, Any]:
        """Return the arguments of the run of this name."""
        data = self.folder / "digits.npz"
        return {"data": data, "project_dir": self.project(name), **more}

    def run(self, how: str, library: str, name: str, **more: Any) -> list[dict[str, Any]]:
        """Run the script as a program and return the lines that it printed."""
        script = self.folder / f"train_with_{library}.py"
        start = WITHOUT_DEEPSPEED + KEEPS_GROUP if library == REFERENCE else ""
        script.write_text(start + SCRIPT.replace("{library}", library))
        options = self.options(name, **more).items()
        arguments = [text for key, value in options for text in (f"--{key}", str(value))]
        done = forker.run(
            [sys.executable, *(TORCHRUN if how == "torchrun" else []), str(script), *arguments],
            libraries=LIBRARIES,
            env=_environment(library),
            cwd=self.folder,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return parsed(done.stdout.splitlines())


def _environment(library: str) -> dict[str, str]:
    unset = ("ACCELERATE_USE_CPU", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: text for name, text in os.environ.items() if name not in unset}
    own = {"PYTHONPATH": str(ROOT), **READ_BY_TORCH}
    # without it, processes of torchrun without a GPU train alone
    return kept | own | ({"ACCELERATE_USE_CPU": "true"} if library == REFERENCE else {})


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    """Return the objects that were printed, a prefix for the rank taken off."""
    found: list[dict[str, Any]] = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    return found


def scalars(project: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would plot."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(project / "logs" / "digits"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module", autouse=True)
def _copied_with_variables() -> Iterator[None]:
    """Copy programs and the kernel from a process with their variables."""
    with forker.session({**os.environ, **READ_BY_TORCH}):
        yield


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    import numpy
    from sklearn.datasets import load_digits

    make_event_loop()
    folder = tmp_path_factory.mktemp("scripts")
    digits = load_digits()
    numpy.savez(folder / "digits.npz", pictures=digits.data[:401], labels=digits.target[:401])
    return Scripts(folder)


@pytest.fixture(scope="module")
def printed(scripts: Scripts) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What the script printed from start to end, by how it ran and with what; two run at a time."""

    def run(how: str, library: str) -> list[dict[str, Any]]:
        more = ALONE if how == "alone" else {}
        return scripts.run(how, library, f"{how}-{library}", checkpoint_at=CHECKPOINT, **more)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(FULL, pool.map(run, *zip(*FULL, strict=True)), strict=True))


@pytest.mark.parametrize(("how", "batches"), [("torchrun", 10), ("alone", 19)])
def test_a_script_gives_the_same(how: str, batches: int, scripts: Scripts, printed: Any) -> None:
    ours, theirs = printed[how, OURS], printed[how, REFERENCE]
    assert len(ours) == 2 * (batches + 1) and ours[-1]["samples"] == 101
    assert not differences(ours, theirs)
    assert ours[-1]["right"] > 60 and len({line["rate"] for line in ours if "rate" in line}) > 5
    logged, wanted = (scalars(scripts.project(f"{how}-{library}")) for library in (OURS, REFERENCE))
    assert not differences(logged, wanted)
    assert [step for step, _ in logged["accuracy"]] == [batches, 2 * batches]


def test_accelerate_goes_on_from_our_checkpoint(scripts: Scripts, printed: Any) -> None:
    checkpoint = scripts.project(f"alone-{OURS}") / f"step_{CHECKPOINT}"
    resumed = scripts.run("alone", REFERENCE, "resumed", resume_from_checkpoint=checkpoint, **ALONE)
    assert not differences(resumed, printed["alone", OURS][CHECKPOINT:])


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel with the script's functions in it."""
    started = Kernel(tmp_path, **READ_BY_TORCH)
    started.run(SCRIPT.replace("{library}", OURS).split("def main")[0]).ok()
    started.run("from notebook_accel import notebook_launcher").ok()
    yield started
    started.close()


def test_a_cell_gives_the_same_and_goes_on_from_checkpoints_of_accelerate(
    kernel: Kernel, scripts: Scripts, printed: Any
) -> None:
    def launch(num_processes: int, **more: Any) -> list[dict[str, Any]]:
        rest = {"mixed_precision": "no", "dropout": 0.1, "gradient_accumulation_steps": 2}
        rest |= {"checkpoint_at": None, "resume_from_checkpoint": None}
        options = rest | scripts.options("notebook", **more)
        texts = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
        cell = kernel.run(
            f"""
            config = {{"lr": 0.02, "epochs": 2, "seed": 7, "batch_size": 16}}
            args = argparse.Namespace(**{texts})
            notebook_launcher(training_function, (config, args), num_processes={num_processes})
            """
        ).ok()
        return parsed(cell.lines)

    theirs = printed["torchrun", REFERENCE]
    assert not differences(launch(2), theirs)
    epoch = scripts.project(f"torchrun-{REFERENCE}") / "epoch_0"
    assert not differences(launch(2, resume_from_checkpoint=epoch), theirs[11:])
    step = scripts.project(f"alone-{REFERENCE}") / f"step_{CHECKPOINT}"
    resumed = launch(1, resume_from_checkpoint=step, **ALONE)
    assert not differences(resumed, printed["alone", REFERENCE][CHECKPOINT:])
