"""Runs in which nothing goes on any more."""

from __future__ import annotations

import re

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = [pytest.mark.notebook, pytest.mark.once]


@pytest.fixture(scope="module", autouse=True)
def _patient_watch(kernel: Kernel) -> None:
    """Let ranks answer late: on a busy machine any of them may stand still for some seconds."""
    kernel.run(
        "from notebook_accel.launch.supervise import hang_watch\nhang_watch._ANSWER_SECONDS = 10.0"
    ).ok()


def test_a_collective_that_some_ranks_never_enter_is_told(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def uneven():
            from notebook_accel import Accelerator
            accelerator = Accelerator(cpu=True)
            accelerator.gather(torch.ones(8, 3))
            if accelerator.process_index == 0:
                accelerator.wait_for_everyone()  # the barrier
            else:
                while not os.path.exists("told"):
                    time.sleep(0.1)  # the sleep
                accelerator.wait_for_everyone()
            return "came through"

        notebook_launcher(uneven, num_processes=2, hang_timeout=5)
        """,
        during=(kernel.folder / "told").touch,
        at="rank 0 has entered barrier, rank 1 has not",
    ).ok()
    assert cell.value == "'came through'"
    # a rank that stands still elsewhere for so long is told too
    assert "nothing was heard of ranks 0, 1 for" in cell.stderr
    told = "rank 0 has entered barrier, rank 1 has not\n"
    assert cell.stderr.count(told) == 1, "told once, and waited on"
    report = cell.stderr.partition(told)[2].partition("nothing was heard")[0]
    rank_0, rank_1 = report.partition("rank 1 (process ")[::2]
    assert "wait_for_everyone()  # the barrier" in rank_0 and "in barrier:" in rank_0
    assert "time.sleep(0.1)  # the sleep" in rank_1 and "barrier" not in rank_1
    number_0, number_1 = (
        int(re.findall(r"number (\d+) of default_pg", text)[0]) for text in (rank_0, rank_1)
    )
    assert number_0 == number_1 + 1, "torch's flight recorder says which collective rank 1 has not entered"
    assert re.search(r"gloo:barrier.*, has not ended", rank_0)
    assert re.search(r"gloo:all_gather of 8x3 Float, .* has ended, and nothing came after it", rank_1)


def test_news_of_one_rank_is_progress_of_the_run(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def slow():
            for step in range(36):  # takes longer than the limit, and each step much less
                if os.environ["RANK"] == "1":
                    print("step", step, flush=True)
                time.sleep(0.5)

        notebook_launcher(slow, num_processes=2, hang_timeout=16)
        """
    ).ok()
    assert "nothing was heard" not in cell.stderr


def test_writes_without_newline_are_progress_and_are_shown(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def work():
            for step in range(36):
                print("working", end="\\r", flush=True)
                time.sleep(0.5)
            return "came through"

        notebook_launcher(work, num_processes=2, hang_timeout=16, on_hang="raise")
        """
    ).ok()
    assert cell.value == "'came through'" and sorted(cell.lines) == ["[0] working", "[1] working"]
    assert [data["text/plain"] for data in cell.displays] == ["", ""], "the lines stand in their place"


def test_a_rank_that_cannot_answer_shows_its_stack(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def stuck():
            import ctypes
            if os.environ["RANK"] == "0":
                ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock
            time.sleep(3600)

        notebook_launcher(stuck, num_processes=2, hang_timeout=5, on_hang="raise")
        """
    )
    assert cell.error is not None and cell.error[0] == "HangError"
    assert "rank 0 (process " in cell.error[1] and "does not answer, so C code holds" in cell.error[1]
    assert "time.sleep(3600)" in cell.error[1]


def test_a_hang_is_restarted_as_a_failure_is(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def hangs_once():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                time.sleep(3600)
            return "second attempt"

        notebook_launcher(hangs_once, num_processes=2, hang_timeout=5, on_hang="raise", max_restarts=1)
        """
    ).ok()
    assert cell.value == "'second attempt'"
    assert "restart 1 of 1" in cell.stderr


def test_wrong_arguments(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(print, num_processes=2, hang_timeout=0, on_hang='shout')")
    assert cell.error is not None
    assert (
        "hang_timeout=0: seconds are needed" in cell.error[1] and "on_hang='shout': choose" in cell.error[1]
    )
