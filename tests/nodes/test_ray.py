"""Launches on Ray clusters of two nodes: placement, a node that dies, Ray's client, a kernel that is killed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.notebooks.kernel import Kernel, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.may_leak("children", reason="Ray's own processes"),
    pytest.mark.may_leak("shared_memory", reason="Ray's object store"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

PATIENCE = 240
CLUSTER = """
import os, time
import ray
from ray.cluster_utils import Cluster
from notebook_accel import PartialState, notebook_launcher, runs
from notebook_accel.launch.engines.ray.engine import RayEngine
from tests.patient_ray import be_patient
from tests.ports import free_port

be_patient()
client_port = free_port()
health = {"health_check_period_ms": 1000, "health_check_failure_threshold": 20}
head = {
    "num_cpus": 2,
    "include_dashboard": False,
    "ray_client_server_port": client_port,
    "_system_config": health,  # a dead node is missed after 20 s, and so is one that is slow
}
cluster = Cluster(initialize_head=True, head_node_args=head)
second = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
spread = RayEngine(placement="SPREAD")

def f():
    return os.environ["RANK"]
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    patience = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120"}  # of the head, on a busy machine
    kernel = Kernel(tmp_path_factory.mktemp("ray"), **patience)
    try:
        kernel.run(CLUSTER, timeout=PATIENCE).ok()
        yield kernel
        kernel.run("import ray; ray.shutdown(); cluster.shutdown()", timeout=240)
    finally:
        kernel.close()


def test_ranks_are_spread_over_the_nodes(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def seen():
            from notebook_accel.utils import gather
            state = PartialState()
            ranks = gather(torch.tensor([state.process_index])).tolist()
            names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
            return ranks, [int(os.environ[name]) for name in names]

        import torch
        values = notebook_launcher(seen, num_processes=2, engine=spread, address=cluster.address, returns="all")
        values, runs()[-1].record.nodes
        """,
        timeout=PATIENCE,
    ).ok()
    values, nodes = ast.literal_eval(cell.value)
    assert values == [([0, 1], [0, 0, 1, 0, 2, 2]), ([0, 1], [1, 0, 1, 1, 2, 2])]
    assert list(nodes) == [0, 1] and all(nodes.values())


def test_stop_is_answered_to_ranks_that_ask_unequally_often(kernel: Kernel) -> None:
    """No collective is in it: a rank that asks less often is not waited for."""
    cell = kernel.run(
        """
        def learn():
            from notebook_accel import Accelerator
            accelerator = Accelerator(cpu=True)
            step = 0
            while True:
                step += 1
                if (step % (1 + accelerator.process_index) == 0) and accelerator.should_stop:
                    return step
                if step == 20:
                    print("asked", flush=True)
                time.sleep(0.01)

        run = notebook_launcher(learn, num_processes=2, engine=spread, address=cluster.address, returns="all",
                                block=False)
        while run.lines().count("asked") < 2:
            time.sleep(0.05)
        run.stop(grace=60)
        steps = run.result()
        run.status, min(steps) > 20
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "('stopped', True)"


def test_a_session_has_actors_until_it_is_closed(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from notebook_accel import Session
        with Session(2, engine=spread, address=cluster.address) as session:
            session.push(x=20)
            session.execute("import os; y = x + int(os.environ['RANK'])")
            values = session.pull("y", "all")
            held = ray.available_resources().get("CPU", 0)
            try:
                session.run(lambda: 1 // 0)
            except ZeroDivisionError:
                state = session.status
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU", 0) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        values, held, state, ray.available_resources()["CPU"]
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "([20, 21], 1.0, 'idle', 3.0)"


def test_more_than_the_cluster_has_is_told_with_the_numbers(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(f, num_processes=4, engine='ray', address=cluster.address)")
    assert cell.error is not None and cell.error[0] == "ValueError"
    assert "num_processes=4: each needs 1 CPU, and Ray has room for 3" in cell.error[1]
    assert "has 2 CPU" in cell.error[1] and "has 1 CPU" in cell.error[1]
    cell = kernel.run("notebook_launcher(f, num_processes=3, engine=RayEngine(placement='STRICT_SPREAD'))")
    assert cell.error is not None and "RayEngine(placement='SPREAD')" in cell.error[1]
    cell = kernel.run(
        "notebook_launcher(f, num_processes=1, engine=RayEngine(runtime_env={'working_dir': '.'}))"
    )
    assert cell.error is not None and cell.error[0] == "ValueError" and not cell.stdout
    assert "RayEngine(runtime_env=...): . is not a valid" in cell.error[1]
    assert kernel.run("RayEngine().count({'address': None, 'environment': None}, None)").value == "3"


def test_an_address_that_leads_nowhere_is_told(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        away = RayEngine(notebook_address="nowhere.invalid:0")
        notebook_launcher(f, num_processes=1, engine=away, address=cluster.address)
        """,
        timeout=PATIENCE,
    )
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert "cannot reach this process at nowhere.invalid:" in cell.error[1]


def test_a_node_dies(kernel: Kernel) -> None:
    """What is left has room for both ranks: they start again there; at the next death it has not."""
    cell = kernel.run(
        """
        import threading

        def f(marker):
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if attempt == 0:
                open(f"{marker}{os.environ['RANK']}", "w").close()
                time.sleep(120)
            return attempt, int(os.environ["GROUP_WORLD_SIZE"])

        def remove(marker):
            while not (os.path.exists(f"{marker}0") and os.path.exists(f"{marker}1")):
                time.sleep(0.05)
            cluster.remove_node(second, allow_graceful=False)

        def launch(marker, **more):
            threading.Thread(target=remove, args=(marker,)).start()
            return notebook_launcher(f, (os.path.abspath(marker),), num_processes=2, address=cluster.address, **more)

        launch("first", engine=spread, max_restarts=1)
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "(1, 1)"
    assert "is lost: its node" in cell.stdout + cell.stderr and "restart 1 of 1" in cell.stdout + cell.stderr
    cell = kernel.run(
        """
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        launch("second", engine=RayEngine(placement="STRICT_SPREAD"), max_restarts=1)
        """,
        timeout=PATIENCE,
    )
    assert cell.error is not None and cell.error[0] == "WorkerError"
    assert "is lost: its node" in cell.error[1] and "died" in cell.error[1]
    assert "no restart 1 of 1: num_processes=2: each needs 1 CPU, and Ray has room for 1" in cell.stderr


def test_a_kernel_outside_the_cluster(tmp_path_factory: pytest.TempPathFactory, kernel: Kernel) -> None:
    """It comes by Ray's client; killed, it leaves no rank behind."""
    port = kernel.run("client_port").ok().value
    folder = tmp_path_factory.mktemp("ray_client")
    other = Kernel(folder)

    def launch(source: str) -> str:
        call = f"notebook_launcher(f, num_processes=2, engine='ray', address='ray://127.0.0.1:{port}', returns='all')"
        return f"import os, time\nfrom notebook_accel import notebook_launcher\ndef f():\n{source}\n{call}"

    def kill() -> None:
        other.kill()
        raise InterruptedError

    logs = Path(kernel.run("ray._private.worker._global_node.get_logs_dir_path()").ok().value.strip("'"))
    try:
        cell = other.run(launch("    return os.environ['RANK']"), timeout=PATIENCE)
        servers = [file.read_text()[-1500:] for file in sorted(logs.glob("ray_client_server_*.err"))]
        assert cell.error is None, (cell.traceback[-1500:], *servers)
        assert cell.value == "['0', '1']"
        source = """
    open(f"pid_{os.getpid()}_{os.getppid()}", "w").close()
    while len([name for name in os.listdir() if name.startswith("pid_")]) < 2: time.sleep(0.05)
    print("go", flush=True)
    time.sleep(300)
"""
        with pytest.raises(InterruptedError):
            other.run(launch(source + "    # go"), timeout=PATIENCE, during=kill)
        pids = [int(part) for path in folder.glob("pid_*") for part in path.name.split("_")[1:]]
        assert len(pids) == 4, "two ranks and their actors"
        assert wait_until(lambda: not any(map(psutil.pid_exists, pids[::2])), 30), (
            f"ranks {pids[::2]} still run"
        )
    finally:
        other.close()
