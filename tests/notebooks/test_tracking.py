"""What workers log: metrics reach the record and print nothing, messages in order stay in order."""

from __future__ import annotations

import json

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.notebook

IMPORT = """
from notebook_accel import Accelerator, runs
"""


@pytest.mark.parametrize(("method", "processes"), [("fork", 2), ("forkserver", 2), ("auto", 1)], ids=str)
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
    assert 0 <= age < 60


def test_messages_in_order_come_in_order(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def speak():
            import logging
            from notebook_accel import PartialState
            from notebook_accel.logging import get_logger
            logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
            PartialState(cpu=True)
            logger = get_logger("speak", log_level="INFO")
            for turn in range(10):
                logger.info("turn %d", turn, in_order=True)
        notebook_launcher(speak, num_processes=2)
        """
    ).ok()
    assert cell.lines == [f"[{rank}] [RANK {rank}] turn {turn}" for turn in range(10) for rank in range(2)]
