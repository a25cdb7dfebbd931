"""Preemption by SLURM itself: a job of a partition that counts more takes the nodes of a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.slurm_cluster import KEEPS, SlurmCluster, make_cluster, why_no_cluster
from tests.nodes.slurm_detaching import SETUP, wait_for_ranks
from tests.notebooks.kernel import Kernel, prepare_kernel, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in KEEPS.items()],
]

PATIENCE = 240
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
LEARN = """
def learn(folder):
    "Add one in each step, and save; the first start waits after the third."
    accelerator = Accelerator(project_dir=folder, step_scheduler_with_optimizer=False)
    accelerator.project_configuration.automatic_checkpoint_naming = True
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
    is_first = not accelerator.load_state("latest")
    began = int(accelerator.unwrap_model(model).weight)
    for step in range(began, 5):
        optimizer.zero_grad()
        accelerator.backward(-model(torch.ones(1, 1)).sum())
        optimizer.step()
        accelerator.save_state()
        if step == 2 and is_first:
            Path(folder, f"began{accelerator.process_index}").touch()
            print("go", flush=True)
            time.sleep(1000)
    return began, int(accelerator.unwrap_model(model).weight), os.environ["TORCHELASTIC_RESTART_COUNT"]
"""


@pytest.fixture(scope="module", params=[0, 10], ids="grace of {} s".format)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    """A cluster that ends jobs at once, or asks their processes to end and gives them some time."""
    if reason := why_no_cluster():
        pytest.skip(reason)
    settings = PREEMPTION.format(grace=request.param)
    with make_cluster(tmp_path_factory.mktemp("cluster"), more=settings) as made:
        yield made


@pytest.fixture(scope="module")
def kernel(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTEBOOK_ACCEL_STATE", str(tmp_path_factory.mktemp("jobs")))
        kernel = cluster.start_kernel(tmp_path_factory.mktemp("slurm"))
        with prepare_kernel(kernel, SETUP, LEARN, timeout=PATIENCE):
            yield kernel


def preempt(cluster: SlurmCluster, folder: Path) -> None:
    """Submit a job that takes all nodes from others, and wait until it runs."""
    wait_for_ranks(folder)
    words = ["--parsable", "-phigh", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000"]
    job = cluster.run("sbatch", *words).strip()
    assert wait_until(
        lambda: cluster.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", PATIENCE
    )


def end_other(cluster: SlurmCluster) -> None:
    """End the job that has taken the nodes."""
    (other,) = cluster.run("squeue", "-h", "-p", "high", "-o", "%i").split()
    cluster.run("scancel", other)
    assert wait_until(lambda: other not in cluster.jobs(), PATIENCE)


QUEUED = """
while run.status != "queued" or "PENDING" not in run.record.notice:
    assert not run.is_over, str(run.failure)
    time.sleep(0.05)
run.record.notice
"""
TOLD = """
value, said = run.result(), [getattr(event, "detail", "") for event in run.record.since(0)]
(*value, run.record.restarts, [text for text in said if "restart 1 of 1" in text])
"""


def launch(kernel: Kernel, folder: Path, detach: bool, **more: object) -> None:
    options = {"detach": detach, "block": False, "slurm": {"partition": "low"}, "slurm_keep": 0, **more}
    kernel.run(f"run = launch(learn, {str(folder)!r}, **{options!r})", timeout=PATIENCE).ok()


@pytest.mark.parametrize("detach", [False, True])
def test_the_function_goes_on_from_its_checkpoint(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, detach: bool
) -> None:
    launch(kernel, tmp_path, detach, max_restarts=1)
    preempt(idle, tmp_path)
    notice = kernel.run(QUEUED, timeout=PATIENCE).ok().value
    assert re.search(r"Job \d+( was preempted and is queued again)?: PENDING \(\w+\)", notice), notice
    end_other(idle)
    if "queued again" in notice:
        idle.start_again()
    else:  # a job that holds nodes for a notebook ends by itself after its ranks, if it has the time
        assert "GraceTime=10" in idle.more and not detach, notice
    *value, restarts, said = ast.literal_eval(kernel.run(TOLD, timeout=PATIENCE).ok().value)
    assert (value, restarts) == ([3, 5, "1"], 1)
    assert detach or "was preempted: another job got its nodes" in said[0], said


@pytest.mark.parametrize("detach", [False, True])
def test_without_restarts_the_run_ends_at_once(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, detach: bool
) -> None:
    launch(kernel, tmp_path, detach)
    preempt(idle, tmp_path)
    told = kernel.run("run.wait(100)\nrun.status, str(run.failure)", timeout=PATIENCE).ok().value
    assert told.startswith("('failed'"), told
    assert re.search(r"job \d+ was preempted: another job got its nodes", told), told
