"""Errors, exit codes, signals and restarts of workers, as the cell shows them."""

from __future__ import annotations

import pytest

from tests.notebooks.kernel import METHODS_ONCE, Kernel

pytestmark = pytest.mark.notebook


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_an_error_keeps_its_type_and_shows_the_cell_line(kernel: Kernel, method: str) -> None:
    kernel.run(
        """
        class MyError(Exception):
            def __init__(self, code, reason):
                super().__init__(f"{reason} ({code})")
                self.code = code

        def train():
            if os.environ["RANK"] == "1":
                raise MyError(42, "went wrong")  # the line
            time.sleep(60)
        """
    ).ok()
    caught = kernel.run(
        f"""
        try:
            notebook_launcher(train, num_processes=2, start_method="{method}")
        except MyError as error:
            print("caught", error.code, str(error), type(error) is MyError)
        """
    ).ok()
    assert "caught 42 went wrong (42) True" in caught.stdout
    cell = kernel.run(f"notebook_launcher(train, num_processes=2, start_method='{method}')")
    assert cell.error is not None and cell.error[0] == "MyError"
    assert cell.error[1].splitlines()[0] == "went wrong (42)"
    assert 'raise MyError(42, "went wrong")  # the line' in cell.traceback
    assert "in train()" in cell.traceback
    shown = cell.traceback + cell.stderr
    assert shown.count("raise MyError") == 1, "the cause is shown once"
    assert "rank 1 (process" in shown and "raised this after" in shown
    assert "rank 0 was stopped by the launcher" in shown
    assert not kernel.children()


def test_causes_come_along(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def chain():
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("outer") from error
        notebook_launcher(chain, num_processes=2)
        """
    )
    assert cell.error is not None and cell.error[0] == "ValueError"
    assert "KeyError" in cell.traceback and '{}["missing"]' in cell.traceback
    assert "direct cause" in cell.traceback


def test_every_rank_that_failed_takes_one_line(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def fail():
            time.sleep(0.2 * int(os.environ["RANK"]))
            raise RuntimeError("rank " + os.environ["RANK"] + "\\nmore\\nlines")
        notebook_launcher(fail, num_processes=2)
        """
    )
    assert cell.error is not None
    assert cell.error[1].startswith(("rank 0\nmore\nlines", "rank 1\nmore\nlines"))  # whichever fails first


@pytest.mark.once
def test_errors_that_cannot_be_made_again_still_speak(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import threading
        def local():
            class Odd(Exception):
                def __reduce__(self): raise TypeError("no")
                def __new__(cls, *args):
                    if not args: raise TypeError("needs one")
                    return super().__new__(cls, *args)
            error = Odd("strange")
            error.lock = threading.Lock()
            raise error
        notebook_launcher(local, num_processes=2)
        """
    )
    assert cell.error is not None
    assert "strange" in cell.error[1]
    assert cell.error[0] in ("Odd", "WorkerError")


def test_the_first_failure_by_time_is_the_cause(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def collective():
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                print("failing at", time.time())
                raise ZeroDivisionError("the cause")
            dist.barrier()
        try:
            notebook_launcher(collective, num_processes=2)
        except ZeroDivisionError:
            print("raised at", time.time())
        """
    ).ok()
    failed, raised = (float(line.split()[-1]) for line in cell.lines if " at " in line)
    assert raised - failed < 120, "gloo itself waits for half an hour"


def test_ranks_that_returned_while_another_waits_for_them_are_named(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import sys
        def leave_early():
            dist.init_process_group("gloo")
            if dist.get_rank() == 1:
                sys.exit()
            if dist.get_rank() == 0:
                dist.barrier()
        notebook_launcher(leave_early, num_processes=3)
        """
    )
    assert cell.error is not None and cell.error[0] == "RuntimeError"
    for rank in (1, 2):
        assert (
            f"rank {rank} took no part any more: its function had returned, or called sys.exit(), after"
            in cell.told
        )


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_a_hang_in_a_collective_does_not_delay_the_error(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        def hang():
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                time.sleep(0.5)  # the others wait by then
                print("failing at", time.time())
                raise ZeroDivisionError("the cause")
            dist.recv(torch.zeros(1), src=3 - dist.get_rank())  # neither ever sends
        started = time.time()
        try:
            notebook_launcher(hang, num_processes=3, start_method="{method}", output="first")
        except ZeroDivisionError:
            print("raised at", time.time())
        """
    ).ok()
    times = [float(line.split()[-1]) for line in cell.lines if " at " in line]
    assert times[1] - times[0] < 120, "gloo itself waits for half an hour"


@pytest.mark.once
@pytest.mark.parametrize(
    ("code", "name", "texts"),
    [
        ("os.kill(os.getpid(), 9)", "WorkerKilledError", ["SIGKILL", "out-of-memory"]),
        ("import ctypes; ctypes.string_at(0)", "WorkerKilledError", ["SIGSEGV", "crash in C code"]),
        ("os.abort()", "WorkerKilledError", ["SIGABRT", "C code gave up"]),
        ("os.kill(os.getpid(), 15)", "WorkerKilledError", ["SIGTERM", "outside the launch"]),
        ("sys.exit(3)", "WorkerExitedError", ["exit code 3"]),
        ("os._exit(0)", "WorkerExitedError", ["exit code 0"]),
    ],
)
def test_exit_codes_and_signals_are_named(kernel: Kernel, code: str, name: str, texts: list[str]) -> None:
    cell = kernel.run(
        f"""
        def die():
            if os.environ["RANK"] == "1":
                print("last words", end="", flush=True)
                {code}
            time.sleep(3600)
        notebook_launcher(die, num_processes=2)
        """
    )
    assert cell.error is not None
    assert cell.error[0] == name
    assert "rank 1 (process" in cell.error[1]
    assert all(text in cell.error[1] for text in texts), cell.error[1]
    assert "[1] last words" in cell.lines
    if "ctypes" in code:
        assert "Segmentation fault" in cell.stderr and "in die" in cell.stderr


@pytest.mark.once
def test_tensors_of_different_shapes_are_named_where_gloo_gives_up(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def gather():
            from notebook_accel import Accelerator
            accelerator = Accelerator(cpu=True)
            accelerator.gather(torch.zeros(2 - accelerator.process_index))  # more than rank 1 expects
        notebook_launcher(gather, num_processes=2)
        """
    )
    assert cell.error is not None and cell.error[0] == "WorkerKilledError"
    assert "rank 1 (process" in cell.error[1] and "different shapes" in cell.error[1], cell.error[1]


@pytest.mark.once
def test_a_killed_rank_is_the_cause_not_its_peers_lost_connection(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def killed():
            dist.init_process_group("gloo")
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        notebook_launcher(killed, num_processes=2)
        """
    )
    assert cell.error is not None
    assert cell.error[0] == "WorkerKilledError" and "rank 1" in cell.error[1].splitlines()[0]


def test_a_plain_exit_is_a_return(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(lambda: sys.exit(), num_processes=2, returns='all')").ok()
    assert cell.value == "[None, None]"


@pytest.mark.once
def test_restarts_are_told(kernel: Kernel) -> None:
    kernel.run("import pathlib; tries = pathlib.Path('tries'); tries.write_text('')").ok()
    cell = kernel.run(
        """
        import socket
        probe = socket.socket(); probe.bind(("", 0)); port = probe.getsockname()[1]; probe.close()
        def flaky():
            dist.init_process_group("gloo")
            dist.barrier()
            if dist.get_rank() == 0:
                with tries.open("a") as file: file.write("x")
                if len(tries.read_text()) < 3:
                    raise OSError("not yet")
            dist.barrier()
            return os.environ["TORCHELASTIC_RESTART_COUNT"]
        notebook_launcher(flaky, num_processes=2, max_restarts=3, monitor_interval=0.05, use_port=port)
        """
    ).ok()
    assert cell.value == "'2'"
    assert cell.stderr.count("raised OSError: not yet; restart") == 2
    assert "restart 1 of 3" in cell.stderr and "restart 2 of 3" in cell.stderr


@pytest.mark.once
def test_restarts_end(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def broken(): raise OSError("never " + os.environ["TORCHELASTIC_RESTART_COUNT"])
        notebook_launcher(broken, num_processes=2, max_restarts=1)
        """
    )
    assert cell.error is not None
    assert cell.error[0] == "OSError" and cell.error[1].startswith("never 1")


@pytest.mark.once
def test_wrong_arguments_come_all_at_once_before_anything_starts(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        notebook_launcher(lambda a: a, (1, 2), num_processes=0, mixed_precision="fp17", use_port=70_000,
                          node_rank=2, num_nodes=2, rdzv_backend="etcd", max_restarts=-1, monitor_interval=0,
                          start_method="thread", returns="last", output="some",
                          log_line_prefix_template="${who}")
        """
    )
    assert cell.error is not None
    name, text = cell.error
    assert name == "ValueError"
    assert "12 problems" in text
    for part in (
        "num_processes=0: at least 1",
        "'fp17': choose among 'no', 'fp16', 'bf16', 'fp8'",
        "use_port=70000: a port from 0 to 65535",
        "node_rank=2 with num_nodes=2: choose from 0 to 1",
        "rdzv_backend='etcd': choose among 'static', 'c10d'",
        "max_restarts=-1: at least 0",
        "monitor_interval=0",
        "start_method='thread': choose among 'auto', 'fork', 'fresh'",
        "returns='last': choose among 'first', 'all', 'none'",
        "output='some': choose among 'all', 'first', 'none'",
        "it may name ${rank}",
        "too many positional arguments",
    ):
        assert part in text, f"{part} is missing in {text}"
    assert "Launching" not in cell.stdout


@pytest.mark.once
def test_a_taken_port_is_said_before_anything_starts(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import socket
        taken = socket.socket(); taken.bind(("", 0)); taken.listen()
        notebook_launcher(print, num_processes=2, use_port=taken.getsockname()[1])
        """
    )
    kernel.run("port = taken.getsockname()[1]; taken.close()").ok()
    assert cell.error is not None and "in use" in cell.error[1]
    assert "Launching" not in cell.stdout
    kernel.run("notebook_launcher(print, num_processes=2, use_port=str(port))").ok()


@pytest.mark.once
def test_a_launch_inside_a_worker_is_refused(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(lambda: notebook_launcher(print, num_processes=2), num_processes=2)")
    assert cell.error is not None
    assert cell.error[0] == "ValueError" and "not inside a worker" in cell.error[1]
