"""Disks that are full or slow, and files that may not grow; see `test_table` for where else such faults are tested."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from notebook_accel.config.schema import LaunchConfig
from tests.faults.places import small_disk
from tests.faults.scripts import run

SPEAK = """
    def speak():
        for number in range(4000):
            print("a line of output", number)
        return int(os.environ["RANK"])
"""


def test_logs_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    code = """
    for method in ("fork", "fresh"):
        print(method, notebook_launcher(speak, num_processes=2, start_method=method, returns="all", view="none",
                                        output="none", log_dir="disk/logs"))
    print("files", sorted(os.listdir("disk/logs")))
    run = notebook_launcher(speak, num_processes=2, view="none", output="none", log_dir="disk/logs", block=False)
    print("background", run.result(), len(run.lines()))
    """
    out = run(SPEAK + code, tmp_path, prefix=small_disk(tmp_path / "disk", "size=64k"))
    assert "fork [0, 1]" in out and "fresh [0, 1]" in out and "background 0 8000" in out
    assert out.count("is not complete ([Errno 28]") == 3
    assert "files ['rank_" in out, (
        out
    )  # whose lines came first: they may fill the disk before the other rank has a file


def test_files_may_not_grow(tmp_path: Path) -> None:
    """A limit on the size of files is not one on what is launched, as far as nothing is written to the disk."""
    code = """
    import resource, torch
    torch.set_num_threads(1)
    big = torch.ones(1 << 16)
    def total(): return big.sum().item()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, before[1]))
    for method in ("fork", "fresh"):
        print(method, notebook_launcher(speak, num_processes=2, start_method=method, returns="all", view="none",
                                        output="none", log_dir="logs"))
        try:
            print("big", notebook_launcher(total, num_processes=2, start_method=method, view="none"))
        except na.LaunchError as error:
            print("refused:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    """
    out = run(SPEAK + code, tmp_path)
    for method in ("fork", "fresh"):
        assert f"{method} [0, 1]" in out, out
    assert out.count("is not complete ([Errno 27]") == 2, out
    assert out.count("big 65536.0") + out.count("refused: ") == 2, out
    assert out.count("ulimit -f") == out.count("refused: "), out


def test_a_notebook_on_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    wait = "import json, time\nwhile not json.load(open('disk/y.ipynb'))['cells'][0]['outputs']: time.sleep(0.05)"
    cells = ["print('first')", wait, "print('x' * 300_000)", "print('last')"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbformat.write(book, tmp_path / "x.ipynb")
    out = run(
        """
        import json
        from notebook_accel.cli.main import main
        try:
            main(["launch", "x.ipynb", "--output", "disk/y.ipynb"])
        except SystemExit as stop:
            print("exit", stop.code)
        print("files", os.listdir("disk"))
        print(json.dumps(json.load(open("disk/y.ipynb"))["cells"][0]["outputs"]))
        """,
        tmp_path,
        prefix=small_disk(tmp_path / "disk", "size=128k"),
    )
    assert "exit 1" in out and "files ['y.ipynb']" in out and "Traceback" not in out, out
    assert "first" in out.splitlines()[-1]
    assert "disk/y.ipynb cannot be written" in out and "No space left on device" in out
    assert "wrote disk/y.ipynb" not in out


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_config_on_a_full_disk(tmp_path: Path, ending: str) -> None:
    (tmp_path / "disk").mkdir()
    LaunchConfig(num_processes=2).write(tmp_path / f"c.{ending}")
    code = """
        import shutil
        from notebook_accel.cli.main import main
        shutil.copy("c.ENDING", "disk")
        with open("disk/filling", "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 512): pass
            except OSError:
                pass
        for command in (["update", "--num_processes", "3"], ["default", "--overwrite"]):
            try:
                main(["config", *command, "--config-file", "disk/c.ENDING"])
            except SystemExit as stop:
                print("exit", stop.code)
        try:
            na.write_basic_config(save_location="disk/new.ENDING")
        except OSError as error:
            print("raised", error)
        print("files", sorted(os.listdir("disk")), open("disk/c.ENDING").read() == open("c.ENDING").read())
    """.replace("ENDING", ending)
    out = run(code, tmp_path, prefix=small_disk(tmp_path / "disk", "size=16k"))
    assert out.count("exit 1") == 2 and out.count(f"disk/c.{ending} cannot be written: No space left") == 2, (
        out
    )
    assert f"files ['c.{ending}', 'filling'] True" in out and "Traceback" not in out, out


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_no_room_for_temporary_files(tmp_path: Path, method: str) -> None:
    """There is not even a place for a socket."""
    (tmp_path / "disk").mkdir()
    out = run(
        f"""
        import tempfile
        tempfile.tempdir = os.path.abspath("disk")
        os.environ["TMPDIR"] = tempfile.tempdir
        def value(): return int(os.environ["RANK"])
        try:
            print(notebook_launcher(value, num_processes=2, start_method={method!r}, returns="all", view="none"))
        except na.LaunchError as error:
            print("refused:", error)
        """,
        tmp_path,
        prefix=small_disk(tmp_path / "disk", "nr_inodes=1"),
    )
    assert "[0, 1]" in out, out


def test_a_log_that_is_a_pipe_which_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "rank_0.log")
    out = run(
        """
        def speak():
            for number in range(20_000):
                print("a line of output", number)
            return "the end"
        print(notebook_launcher(speak, num_processes=2, view="none", output="none", log_dir="logs"))
        """,
        tmp_path,
    )
    assert "the end" in out and out.count("is not complete") == 1


def test_training_goes_on_while_a_slow_disk_takes_a_checkpoint(tmp_path: Path) -> None:
    """The disk takes no byte before the loop goes on: a save that waited for it would never end."""
    out = run(
        """
        import torch
        from notebook_accel import Accelerator
        def train():
            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(2, 2))
            sync = os.fsync
            def slow(handle):
                wait_until(lambda: os.path.exists("go on"), "the loop goes on")
                sync(handle)
            os.fsync = slow
            accelerator.save_state("kept", async_save=True)
            accelerator.wait_for_everyone()
            there = os.path.exists("kept")
            accelerator.wait_for_everyone()
            open("go on", "w").close()
            accelerator.end_training()
            return there, os.path.exists("kept/notebook_accel.json")
        print(notebook_launcher(train, num_processes=2, returns="all", view="none"))
        """,
        tmp_path,
    )
    assert "[(False, True), (False, True)]" in out


@pytest.mark.parametrize("background", [False, True])
def test_an_interrupt_while_a_slow_disk_takes_a_checkpoint(tmp_path: Path, background: bool) -> None:
    out = run(
        f"""
        import torch, psutil
        from notebook_accel import Accelerator
        def train():
            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(2, 2))
            accelerator.step = 1
            accelerator.save_state("kept")
            def slow(handle):
                open(f"began{{accelerator.process_index}}", "w").close()
                time.sleep(300)
            os.fsync = slow
            accelerator.step = 2
            accelerator.save_state("kept", async_save={background})
            accelerator.end_training()
        def interrupt():
            wait_until(lambda: os.path.exists("began0") and os.path.exists("began1"), "the disk is busy")
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            notebook_launcher(train, num_processes=2, view="none")
        except KeyboardInterrupt:
            print("interrupted", psutil.Process().children())
        def load():
            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(2, 2))
            accelerator.load_state("kept")
            return accelerator.step
        print("step", notebook_launcher(load, num_processes=2, view="none"))
        """,
        tmp_path,
    )
    assert "interrupted []" in out and "step 1" in out, out
