"""What workers log: metrics reach the record and print nothing, messages in order stay in order."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.notebooks.conftest import IMPORTS
from tests.notebooks.kernel import Kernel, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.once]

IMPORT = """
from notebook_accel import Accelerator, runs
"""


@pytest.mark.parametrize(("method", "processes"), [("fork", 2), ("fresh", 2), ("auto", 1)], ids=str)
def test_metrics_reach_the_record_and_print_nothing(kernel: Kernel, method: str, processes: int) -> None:
    kernel.run(IMPORT).ok()
    cell = kernel.run(
        f"""
        def train():
            accelerator = Accelerator(cpu=True)
            rank = accelerator.process_index
            for step in range(3):
                accelerator.log({{"loss": torch.tensor(1.0 / (step + 1)), "rank": rank, "note": "x"}}, step=step)
            accelerator.log({{"done": True}})
            accelerator.end_training()
        notebook_launcher(train, num_processes={processes}, start_method="{method}")
        """
    ).ok()
    assert cell.lines == [] and cell.stderr == "" and cell.displays == []
    value = kernel.run(
        """
        import json
        points = {name: [[p.step, p.value] for p in kept] for name, kept in runs()[-1].record.metrics.items()}
        age = max(time.time() - p.time for kept in runs()[-1].record.metrics.values() for p in kept)
        print(json.dumps([points, age]))
        """
    ).ok()
    points, age = json.loads(value.stdout)
    assert points == {
        "loss": [[0, 1.0], [1, 0.5], [2, pytest.approx(1 / 3)]],
        "rank": [[0, 0.0], [1, 0.0], [2, 0.0]],
        "done": [[None, 1.0]],
    }
    assert 0 <= age < 600
    of_ranks = kernel.run(
        """
        def read(rank=None):
            table = runs()[-1].rank_metrics(rank)
            rows = table if isinstance(table, list) else table.to_dict("records")
            return sorted((row["rank"], row["step"], row["metric_rank"]) for row in rows if row["step"] is not None)
        print(json.dumps([read(), read(0)]))
        """
    ).ok()
    rows = [[rank, step, float(rank)] for rank in range(processes) for step in range(3)]
    assert json.loads(of_ranks.stdout) == [rows, rows[:3]], "each rank has its own"


def test_messages_in_order_come_in_order(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def speak():
            import logging
            from notebook_accel import PartialState
            from notebook_accel.logging import get_logger
            from notebook_accel.stream import capture
            capture._READ_SECONDS = 60.0  # the kernel may stand still on a busy machine
            logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
            PartialState(cpu=True)
            logger = get_logger("speak", log_level="INFO")
            for turn in range(10):
                logger.info("turn %d", turn, in_order=True)
        notebook_launcher(speak, num_processes=2)
        """
    ).ok()
    assert cell.lines == [f"[{rank}] [RANK {rank}] turn {turn}" for turn in range(10) for rank in range(2)]


TRACKED = """
from notebook_accel import print_metrics
from notebook_accel.launch.supervise import stop_agreement
stop_agreement._ANSWER_SECONDS = 60.0  # a rank may stand still on a busy machine

def train():
    accelerator = Accelerator(log_with="tensorboard", project_dir="logs", cpu=True)
    accelerator.init_trackers("first")
    for step in range(3):
        print_metrics(told=step, step=step)
        accelerator.log({"kept": step * 10.0}, step=step)
    print("asks", accelerator.should_stop)
    while not accelerator.should_stop:
        time.sleep(0.01)
    accelerator.end_training()
    return "saved"
"""


def test_tensorboard_in_a_cell_and_the_view_show_one_run(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("tensorboard")
    programs = Path(tensorboard.__file__).parents[4] / "bin"  # the magic looks for one on the path
    folder = tmp_path / "tmp"  # TensorBoard keeps a list of its processes there
    folder.mkdir()
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    kernel = Kernel(tmp_path, NOTEBOOK_ACCEL_VIEW="widget", TMPDIR=str(folder), PATH=path)
    servers: list[psutil.Process] = []
    try:
        magic = kernel.run(
            "%load_ext tensorboard\n%tensorboard --logdir logs --port 0 --reload_interval 1"
        ).ok()
        servers = kernel.children()
        assert "tensorboard-frame" in magic.displays[0]["text/html"] and servers
        kernel.run(IMPORTS + IMPORT + TRACKED).ok()
        cell = kernel.run("run = notebook_launcher(train, num_processes=2, block=False)").ok()
        assert "application/vnd.jupyter.widget-view+json" in cell.displays[0]
        kernel.run("while str(run.lines()).count('asks False') < 2: time.sleep(0.05)")
        kernel.run("while len(run.record.metrics.get('kept', [])) < 3: time.sleep(0.05)\nrun.stop()").ok()
        assert kernel.run("notebook_launcher(lambda: 'next', num_processes=2)").ok().value == "'next'"
        told = (
            "{name: [p.value for p in points] for name, points in run.record.metrics.items()}, run.result()"
        )
        assert kernel.run(told).value == "({'told': [0.0, 1.0, 2.0], 'kept': [0.0, 10.0, 20.0]}, 'saved')"
        assert kernel.children() == servers, "the user's server is nobody of ours"
        found = re.search(r"const port = (\d+)", magic.displays[0]["text/html"])
        assert found is not None
        assert wait_until(lambda: scalars(int(found[1])) == [0.0, 10.0, 20.0], 120)
    finally:
        for server in servers:
            server.kill()
        kernel.close()


def scalars(port: int) -> list[float]:
    """Return what a TensorBoard shows of the values that the run has logged, nothing before it has read them."""
    query = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?tag=kept&run=first"
    try:
        with urllib.request.urlopen(query, timeout=10) as answer:
            return [value for _, _, value in json.load(answer)]
    except urllib.error.HTTPError:
        return []
