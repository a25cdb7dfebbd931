"""Runs by SLURM that outlive their notebook: left, attached to again, stopped, queued again, lost."""

from __future__ import annotations

import ast
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.slurm_cluster import KEEPS, SlurmCluster
from tests.nodes.slurm_detaching import SETUP, list_drivers, wait_for_ranks
from tests.notebooks.kernel import Kernel, prepare_kernel, wait_until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    *[pytest.mark.may_leak(kind, reason=reason) for kind, reason in KEEPS.items()],
]

PATIENCE = 180


@pytest.fixture(scope="module")
def jobs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the runs of these tests are, by a name with a blank and what SLURM has a meaning for."""
    folder = tmp_path_factory.mktemp("runs of jobs, 100%jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTEBOOK_ACCEL_STATE", str(folder))
        yield folder / "runs"


@pytest.fixture(scope="module")
def kernel(
    cluster: SlurmCluster, jobs_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernel]:
    kernel = cluster.start_kernel(tmp_path_factory.mktemp("slurm"))
    with prepare_kernel(kernel, SETUP, timeout=PATIENCE):
        yield kernel


def test_a_run_outlives_its_kernel(cluster: SlurmCluster, kernel: Kernel, tmp_path: Path) -> None:
    first = cluster.start_kernel(tmp_path)
    try:
        first.run(SETUP, timeout=PATIENCE).ok()
        first.run(f"run = launch(train, {str(tmp_path)!r}, 4, block=False)", timeout=PATIENCE).ok()
        (job,) = cluster.jobs()
        texts = "[event.text for event in run.record.since(0) if hasattr(event, 'text')]"
        said = ast.literal_eval(first.run(texts).ok().value)
        assert (
            f"Job {job} goes on without this notebook: notebook_accel.attach({job}) shows it again" in said[0]
        )
        wait_for_ranks(tmp_path)
        first.kill()
    finally:
        first.close()
    time.sleep(1)
    assert job in cluster.jobs()

    def go_on() -> None:
        (tmp_path / "go").touch()

    cell = kernel.run(
        f"print('go', flush=True)\nattach({job}, view='text')", timeout=PATIENCE, during=go_on
    ).ok()
    assert ast.literal_eval(cell.value) == [1.5, 2.5]
    for rank in (0, 1):
        said = [line for line in cell.lines if line.endswith(f"of rank {rank}")]
        assert said == [f"[{rank}] step {step} of rank {rank}" for step in range(4)]
    assert re.search(rf"Job {job}: train on 2 processes on 2 nodes, launched .* ago", cell.stdout)
    assert f", job {job}>" in kernel.run("runs()[-1]").ok().value
    assert wait_until(lambda: job not in cluster.jobs(), PATIENCE)
    cell = kernel.run(
        "again = attach(block=False, view='none')  # the newest\n"
        "again.result(), again.status, [row['loss'] for row in list(again.record.rows())][-1], "
        "{bar.count for bar in again.record.progress.values()}"
    ).ok()
    assert ast.literal_eval(cell.value) == ([1.5, 2.5], "done", 0.25, {4.0})
    lasted = ast.literal_eval(
        kernel.run(
            "[again.seconds, [each for each in [attach(block=False, view='none')] if each.wait()][0].seconds]"
        )
        .ok()
        .value
    )
    assert lasted[0] == lasted[1], "not until it is looked at"


def test_an_interrupt_leaves_the_run_and_stop_asks_it_to_save(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    def interrupt() -> None:
        wait_for_ranks(tmp_path)
        kernel.interrupt()

    cell = kernel.run(
        f"print('go', flush=True)\nlaunch(train, {str(tmp_path)!r}, 4)", timeout=PATIENCE, during=interrupt
    )
    (job,) = idle.jobs()
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert f"job {job} goes on: notebook_accel.attach({job})" in cell.error[1]
    kernel.run("(left,) = [run for run in runs() if run.status == 'left'][-1:]").ok()
    cell = kernel.run("left.result()")
    assert (
        cell.error is not None and cell.error[0] == "RunLeftError" and f"job {job} goes on" in cell.error[1]
    )
    cell = kernel.run(
        f"""
        import sys, threading, traceback
        run = attach({job}, block=False)
        while len(run.lines()) < 4:
            time.sleep(0.05)
        main = threading.main_thread().ident
        def tell():  # an interrupt before the wait would end the cell
            while ("wait", "run.py") not in [
                (at.name, Path(at.filename).name) for at in traceback.extract_stack(sys._current_frames()[main])
            ]:
                time.sleep(0.05)
            time.sleep(0.5)
            print("go", flush=True)
        threading.Thread(target=tell).start()
        try:
            run.wait()
        except KeyboardInterrupt as error:
            print(run.status, run.is_over, run.failure, error)
        """,
        timeout=PATIENCE,
        during=kernel.interrupt,
    )
    assert cell.error is None, cell.traceback
    assert re.search(rf"left True job {job} goes on.*job {job} goes on", cell.stdout), cell.stdout
    assert idle.jobs() == [job]
    kernel.run(f"other = attach({job}, block=False, view='none')").ok()
    cell = kernel.run("left.stop(30)\nleft.result(), left.status, len(left.lines(1))", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == ("stopped at 1", "stopped", 2)
    assert wait_until(lambda: not idle.jobs(), PATIENCE)
    cell = kernel.run(f"other.wait(), other.status, attach({job}, view='none')", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == (True, "stopped", "stopped at 1")
    assert "goes on without this notebook" not in cell.stdout + cell.stderr


def test_output_goes_on_while_slurm_does_not_answer(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    kernel.run(f"run = launch(talk, {str(tmp_path)!r}, 'go', 'end', block=False)", timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    with idle.frozen():
        kernel.run("known = list_asking()  # may have their answer already").ok()
        asks = "asking = list_asking() - known\nbool(asking)"
        assert wait_until(lambda: kernel.run(asks).value == "True", 120)
        (tmp_path / "go").touch()
        cell = kernel.run(
            """
            while not all("after go" in run.lines(rank) for rank in (0, 1)):
                time.sleep(0.01)
            asking <= list_asking()
            """
        )
        assert cell.ok().value == "True", "it still waits for an answer"
        (tmp_path / "end").touch()
    cell = kernel.run("run.result(), run.status", timeout=PATIENCE).ok()
    assert ast.literal_eval(cell.value) == (0, "done")


def test_an_error_has_the_lines_of_the_cell_of_another_kernel(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    kernel.run(
        """
        def fails():
            if os.environ["RANK"] == "1":
                wrong = {}
                wrong["key"]  # the line
            time.sleep(100)

        run = launch(fails, block=False, view="none")
        run.wait()
        """,
        timeout=PATIENCE,
    ).ok()
    job = re.findall(r"\d+", kernel.run("print(run.record.notice)").stdout)[0]
    other = idle.start_kernel(tmp_path)
    try:
        cell = other.run(
            f"import notebook_accel\nnotebook_accel.attach({job}, view='text')", timeout=PATIENCE
        )
    finally:
        other.close()
    assert cell.error == ("KeyError", "'key'")
    assert 'wrong["key"]  # the line' in cell.traceback
    assert re.search(r"rank 1 \(on n2, process \d+\) raised this after \d+\.\d s", cell.told)
    assert "rank 0 was stopped by the launcher" in cell.told


def test_a_job_that_waits_runs_later_and_a_cancelled_one_is_told(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    idle.run("sbatch", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000")
    (other,) = idle.jobs()
    cell = kernel.run(
        f"""
        run = launch(train, {str(tmp_path)!r}, 4, block=False)
        while run.status != "queued" or "Resources" not in run.record.notice:
            time.sleep(0.05)
        run.record.notice
        """,
        timeout=PATIENCE,
    ).ok()
    assert re.search(
        r"PENDING \(Resources\), estimated start .* It goes on without this notebook", cell.value
    )
    idle.run("scancel", other)
    wait_for_ranks(tmp_path)
    kernel.run("see_steps(run)", timeout=PATIENCE).ok()
    (job,) = idle.jobs()
    idle.run("scancel", job)
    cell = kernel.run("run.result()", timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert f"job {job} has ended: CANCELLED" in cell.error[1]
    assert kernel.run("'step 1 of rank 1' in run.lines(1)").value == "True"


@pytest.mark.parametrize("is_requeued", [False, True], ids=["cancelled", "queued again"])
def test_last_words_are_not_lost_when_slurm_ends_the_job(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, jobs_folder: Path, is_requeued: bool
) -> None:
    code = f"launch(talk, {str(tmp_path)!r}, 'speak', 'go', block=False, max_restarts={int(is_requeued)})"
    kernel.run(f"run = {code}", timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    (driver,) = list_drivers(jobs_folder)
    driver.suspend()  # until SLURM wakes it to end it
    (tmp_path / "speak").touch()
    assert wait_until(lambda: all((tmp_path / f"speak{rank}").exists() for rank in (0, 1)), 60)
    time.sleep(5)  # they are on their way
    if is_requeued:
        idle.run("scontrol", "requeue", *idle.jobs())
        assert wait_until(lambda: not list_drivers(jobs_folder), 60)
        (tmp_path / "go").touch()
        idle.start_again()
        cell = kernel.run("run.wait()\nrun.status, run.record.restarts", timeout=PATIENCE).ok()
        assert "'failed'" not in cell.value, (
            kernel.run("repr(run.failure)").value,
            idle.run("scontrol", "show", "job"),
        )
        assert ast.literal_eval(cell.value) == ("done", 1)
    else:
        idle.run("scancel", *idle.jobs())
        cell = kernel.run("run.result()", timeout=PATIENCE)
        assert cell.error is not None and "has ended: CANCELLED" in cell.error[1], cell.traceback
    said = kernel.run("[run.lines(rank).count('after speak') for rank in (0, 1)]").ok().value
    assert ast.literal_eval(said) == [1 + is_requeued] * 2


def test_a_job_that_is_queued_again_goes_on_in_the_same_view(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    kernel.run(
        f"run = launch(train, {str(tmp_path)!r}, 3, block=False, max_restarts=1)", timeout=PATIENCE
    ).ok()
    wait_for_ranks(tmp_path)
    kernel.run("see_steps(run)", timeout=PATIENCE).ok()
    for file in tmp_path.glob("began*"):
        file.unlink()
    idle.requeue()
    wait_for_ranks(tmp_path)
    (tmp_path / "go").touch()
    cell = kernel.run(
        "run.result(), run.record.restarts, run.lines(1).count('step 0 of rank 1')", timeout=PATIENCE
    )
    assert ast.literal_eval(cell.ok().value) == ([1.5, 2.5], 1, 2)


def test_a_job_that_was_queued_again_counts_that_as_a_restart(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    kernel.run(
        f"""
        def fail_later():
            rank, count = PartialState().process_index, os.environ["TORCHELASTIC_RESTART_COUNT"]
            print("start", count, flush=True)
            if count == "0" and rank == 0:  # the other may still be finding it
                raise OSError("before it is queued again")
            if count != "0":
                Path({str(tmp_path)!r}, f"began{{rank}}").touch()
            if count == "2" and rank == 0:
                raise OSError("on start " + count)
            time.sleep(1000)

        run = launch(fail_later, block=False, max_restarts=2)
        """,
        timeout=PATIENCE,
    ).ok()
    wait_for_ranks(tmp_path)
    kernel.run("while 'start 1' not in run.lines(0): time.sleep(0.05)", timeout=PATIENCE).ok()
    idle.requeue()
    kernel.run("run.wait()", timeout=PATIENCE).ok()
    cell = kernel.run("run.status, run.record.restarts, str(run.failure), run.lines(0)").ok()
    status, restarts, error, lines = ast.literal_eval(cell.value)
    assert (status, restarts, lines) == (
        "failed",
        2,
        ["start 0", "start 1", "start 2"],
    ) and "on start 2" in error


def test_a_full_disk_stops_no_stop_and_damage_is_told(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, jobs_folder: Path
) -> None:
    kernel.run(f"run = launch(train, {str(tmp_path)!r}, 4, block=False)", timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    (job,) = idle.jobs()
    kernel.run(
        """
        import errno
        from notebook_accel.launch.engines.detached.folder import Folder
        ask_to_stop = Folder.ask_to_stop

        def find_no_space(folder, grace):
            raise OSError(errno.ENOSPC, "No space left on device")

        Folder.ask_to_stop = find_no_space
        try:
            run.stop(20)
        finally:
            Folder.ask_to_stop = ask_to_stop
        """,
        timeout=PATIENCE,
    ).ok()
    assert kernel.run("run.result(), run.status").ok().value == "('stopped at 1', 'stopped')"
    (folder,) = (
        each for each in jobs_folder.iterdir() if f'"job": "{job}"' in (each / "run.json").read_text()
    )
    events = folder / "events-0.0"
    written = bytearray(events.read_bytes())
    damaged = written.rindex(b"step 1 of rank")
    written[damaged:] = b"\xff" * (len(written) - damaged)
    events.write_bytes(written)
    cell = kernel.run(f"attach({job}, view='text')", timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] == "LaunchError"
    assert f"what job {job} has written in" in cell.error[1] and "is damaged" in cell.error[1]
    assert "step 0 of rank" in cell.stdout


def test_a_job_that_can_write_nothing_is_told(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, jobs_folder: Path
) -> None:
    kernel.run(
        f"detached.SILENT_SECONDS = 12.0\nrun = launch(train, {str(tmp_path)!r}, 4, block=False)",
        timeout=PATIENCE,
    ).ok()
    wait_for_ranks(tmp_path)
    (driver,) = list_drivers(jobs_folder)
    wait = "while {} not in run.record.notice:\n    time.sleep(0.05)"
    driver.suspend()
    kernel.run(wait.format("'is there room for what it writes'"), timeout=PATIENCE).ok()
    driver.resume()
    kernel.run(wait.format("'goes on without this notebook'"), timeout=PATIENCE).ok()
    (tmp_path / "go").touch()
    told = "run.wait(150), run.record.notice, run.lines(0)[-3:], run.lines(1)[-3:]"
    value = kernel.run(told, timeout=PATIENCE).ok().value
    assert value.startswith("(True"), (value, list(jobs_folder.rglob("*")))
    assert kernel.run("run.result()", timeout=PATIENCE).ok().value == "[1.5, 2.5]"


def test_what_killed_the_process_of_a_job_is_named(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, jobs_folder: Path
) -> None:
    kernel.run(f"run = launch(train, {str(tmp_path)!r}, 4, block=False)", timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    (driver,) = list_drivers(jobs_folder)
    driver.kill()
    cell = kernel.run("run.wait()\nrun.status, str(run.failure)", timeout=PATIENCE).ok()
    status, error = ast.literal_eval(cell.value)
    assert status == "failed" and "its own process was ended by SIGKILL" in error
    assert wait_until(lambda: not idle.jobs(), PATIENCE)


def test_a_stop_while_the_job_waits_cancels_it(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path, jobs_folder: Path
) -> None:
    before = set(jobs_folder.glob("*/work"))
    idle.run("sbatch", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000")
    (other,) = idle.jobs()
    cell = kernel.run(
        f"run = launch(train, {str(tmp_path)!r}, 4, block=False)\nrun.stop()\nrun.status", timeout=PATIENCE
    ).ok()
    assert cell.value == "'stopped'" and idle.jobs() == [other]
    assert set(jobs_folder.glob("*/work")) <= before, "nobody will run the function"


def test_what_cannot_be_attached_to(kernel: Kernel, jobs_folder: Path, tmp_path: Path) -> None:
    cell = kernel.run("attach(987654)")
    assert cell.error is not None and "no run 987654 is known in" in cell.error[1]
    cell = kernel.run("attach('gpu', view='nothing')")
    assert cell.error is not None and cell.error[0] == "ValueError"
    assert "view='nothing'" in cell.error[1]
    cell = kernel.run("attach('gpu')")
    assert cell.error is not None and "no run gpu is known in" in cell.error[1]
    cell = kernel.run("attach(True)")
    assert cell.error is not None and "run=True: the number or the name of a run is needed" in cell.error[1]
    told = {"launched": 0.0, "name": "f", "job": "987654", "cluster": "elsewhere"}
    (jobs_folder / "job-0").mkdir(0o700)
    (jobs_folder / "job-0" / "run.json").write_text(json.dumps(told))
    cell = kernel.run("attach(987654)")
    assert cell.error is not None and "cluster elsewhere has one: attach to it there" in cell.error[1]
    (jobs_folder / "job-0" / "run.json").write_text(json.dumps({**told, "cluster": "test"}))
    (jobs_folder / "job-0").chmod(0o777)
    cell = kernel.run("attach(987654)")
    assert cell.error is not None and "no run 987654 is known in" in cell.error[1], "others may write into it"
    cell = kernel.run(
        "os.environ['SLURM_JOB_ID'] = '1'\ntry:\n    launch(train, '', 1)\nfinally:\n    del os.environ['SLURM_JOB_ID']"
    )
    assert cell.error is not None and "unset SLURM_JOB_ID to submit a job of its own" in cell.error[1]
    cell = kernel.run("notebook_launcher(print, (), 1, detach=True, engine='inprocess')")
    assert cell.error is not None and "detach=True" in cell.error[1] and "engine='slurm'" in cell.error[1]


def test_displays_and_files_of_output(kernel: Kernel, idle: SlurmCluster, tmp_path: Path) -> None:
    cell = kernel.run(
        f"""
        def shows():
            from IPython.display import HTML, display
            print("printed")
            display(HTML("<b>0</b>"), display_id="one").update(HTML("<b>1</b>"))

        os.chdir({str(tmp_path)!r})
        launch(shows, log_dir="logs", num_nodes=1)
        """,
        timeout=PATIENCE,
    ).ok()
    assert [shown["text/html"] for shown in cell.displays if "text/html" in shown] == ["<b>1</b>"]
    assert "printed" in (tmp_path / "logs" / "rank_0.log").read_text(), "the job writes it"
    cell = kernel.run("launch(shows, log_dir='/proc/nope')", timeout=PATIENCE)
    assert cell.error is not None and cell.error[0] == "LaunchError" and "/proc/nope" in cell.error[1]
    assert wait_until(lambda: not idle.jobs(), PATIENCE)


def test_an_interrupt_while_sbatch_answers_loses_no_job(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    client = tmp_path / "sbatch"
    client.write_text(f'#!/bin/sh\nout=$({shutil.which("sbatch")} "$@") || exit\nsleep 2\necho "$out"\n')
    client.chmod(0o755)

    def interrupt() -> None:
        assert wait_until(lambda: bool(idle.jobs()), PATIENCE)
        kernel.interrupt()

    code = f"print('go', flush=True)\nlaunch(train, {str(tmp_path)!r}, 4, num_nodes=1)"
    kernel.run(
        f"before = os.environ['PATH']\nos.environ['PATH'] = {str(tmp_path)!r} + os.pathsep + before"
    ).ok()
    cell = kernel.run(code, timeout=PATIENCE, during=interrupt)
    kernel.run("os.environ['PATH'] = before").ok()
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt", cell.traceback
    (job,) = idle.jobs()
    assert f"job {job} goes on: notebook_accel.attach({job})" in cell.error[1]


def test_a_job_that_is_queued_again_says_so_and_is_cancelled_by_stop(
    kernel: Kernel, idle: SlurmCluster, tmp_path: Path
) -> None:
    code = f"run = launch(train, {str(tmp_path)!r}, 4, block=False, max_restarts=1)"
    kernel.run(code, timeout=PATIENCE).ok()
    wait_for_ranks(tmp_path)
    idle.run("scontrol", "requeue", *idle.jobs())
    cell = kernel.run(
        """
        while run.status != "queued" or "PENDING" not in run.record.notice:
            time.sleep(0.05)
        began = time.monotonic()
        run.stop(5)
        run.status, time.monotonic() - began < 50
        """,
        timeout=PATIENCE,
    ).ok()
    assert cell.value == "('stopped', True)" and not idle.jobs()


def test_a_dry_launch_is_not_left(kernel: Kernel, idle: SlurmCluster) -> None:
    idle.run("sbatch", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000")
    (other,) = idle.jobs()

    def interrupt() -> None:
        assert wait_until(lambda: len(idle.jobs()) == 2, PATIENCE)
        kernel.interrupt()

    code = "print('go', flush=True)\nlaunch(train, '', 4, environment={'ACCELERATE_DEBUG_MODE': 'true'})"
    cell = kernel.run(code, timeout=PATIENCE, during=interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert wait_until(lambda: idle.jobs() == [other], PATIENCE)
