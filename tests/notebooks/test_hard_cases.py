"""Cells that break launchers: locks held at a fork, foreign thread pools, broken output, odd classes and errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.notebooks.kernel import METHODS_ONCE, Kernel, wait_until

pytestmark = pytest.mark.notebook


@pytest.mark.once
@pytest.mark.not_on("darwin", "kernels are not forked")
def test_a_thread_that_draws_random_numbers(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.run(
        """
        import threading, numpy
        stop = threading.Event()
        def draw(function):
            while not stop.is_set(): function()
        threads = [threading.Thread(target=draw, args=(f,)) for f in
                   (lambda: numpy.random.rand(1000), lambda: torch.rand(1000))]
        for thread in threads: thread.start()
        try: results = [notebook_launcher(lambda: 1, num_processes=2) for _ in range(25)]
        finally:
            stop.set()
            for thread in threads: thread.join()
        sum(results)
        """
    ).ok()
    assert cell.value == "25" and "(forked)" in cell.stdout


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_exit_handlers_and_late_threads_find_the_group_open(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        def join_late():
            import atexit, threading
            dist.init_process_group("gloo")
            atexit.register(lambda: print("at exit", dist.is_initialized()))
            def late():
                time.sleep(0.5)
                print("late", dist.get_world_size())
            threading.Thread(target=late).start()
        notebook_launcher(join_late, num_processes=2, start_method={method!r})
        """
    ).ok()
    told = ["at exit True", "late 2"]
    assert sorted(cell.lines) == sorted(f"[{rank}] {text}" for rank in range(2) for text in told)


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_each_process_cleans_up_its_own_folders(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        import os, tempfile, weakref
        of_the_kernel = tempfile.TemporaryDirectory()
        def leave_a_folder():
            global of_the_function
            of_the_function = tempfile.TemporaryDirectory()
            weakref.finalize(of_the_function, print, "done with it")
            return of_the_function.name
        folders = notebook_launcher(leave_a_folder, num_processes=2, returns="all", start_method={method!r})
        notebook_launcher(os.getpid, num_processes=2, start_method={method!r})  # it leaves nothing of its own
        exist = [os.path.exists(folder) for folder in [*folders, of_the_kernel.name]]
        of_the_kernel.cleanup()
        exist
        """
    ).ok()
    assert cell.value == "[False, False, True]"
    assert sorted(cell.lines) == ["[0] done with it", "[1] done with it"]


@pytest.mark.once
def test_torchs_own_thread_pool_is_a_reason_not_to_fork(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.run(
        """
        def pool():
            return torch.jit.script(plain)(torch.ones(1)).item()
        def plain(x: torch.Tensor):
            return torch.jit.wait(torch.jit.fork(torch.neg, x))
        pool()
        notebook_launcher(pool, num_processes=2)
        """,
        timeout=120,
    ).ok()
    assert cell.value == "-1.0" and "(fresh)" in cell.stdout


def test_output_that_cannot_be_shown_leaves_no_worker(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def show():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            from IPython.display import display
            while True:
                display({"text/plain": object()}, raw=True)
                time.sleep(0.05)
        notebook_launcher(show, num_processes=2)
        """
    )
    assert cell.error is not None
    assert wait_until(lambda: not kernel.children(), 60)


@pytest.mark.once
def test_lines_of_a_script_are_on_their_way_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from notebook_accel import notebook_launcher\n"
        "def speak():\n"
        "    print('line', flush=True)\n"
        "    time.sleep(600)\n"
        "notebook_launcher(speak, num_processes=2)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        too_late = threading.Timer(200, process.kill)
        too_late.start()
        lines = [process.stdout.readline() for _ in range(3)]
        too_late.cancel()
        process.kill()
    assert sorted(lines[1:]) == ["[0] line\n", "[1] line\n"]


@pytest.mark.once
def test_a_broken_pipe_ends_the_script_and_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\n"
        "from notebook_accel import notebook_launcher\n"
        "def speak():\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    while True: print('line', flush=True); time.sleep(0.02)\n"
        "notebook_launcher(speak, num_processes=2)\n"
    )
    piped = f"{sys.executable} {script} | head -3"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, timeout=240, check=False, text=True)
    assert sorted(line[3:] for line in done.stdout.splitlines()[1:]) == [" line"] * 2, done.stderr


def test_no_line_of_a_flood_is_lost(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(lambda: sys.stdout.write('x\\n' * 400_000), num_processes=2)").ok()
    assert len(cell.lines) == 800_000


@pytest.mark.once
def test_programs_of_a_failed_rank_end_with_it(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import subprocess
        def start():
            subprocess.Popen(["sleep", "100"])
            if os.environ["RANK"] == "1": raise ValueError("no")
            time.sleep(50)
        notebook_launcher(start, num_processes=2)
        """
    )
    assert cell.error is not None and cell.error[0] == "ValueError"
    assert wait_until(lambda: not kernel.children(), 60), kernel.children()


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_another_class_of_the_same_name_stays_another(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        from collections import namedtuple
        Other = namedtuple("Row", "x y")
        Row = namedtuple("Row", "a b")
        class Counted:
            count = 0
        def make():
            Counted.count += 1
            return Other(1, 2), Row(3, 4), Counted()
        other, row, counted = notebook_launcher(make, num_processes=2, start_method="{method}")
        (other.x, row.a, type(row) is Row, type(counted) is Counted, Counted.count)
        """
    ).ok()
    assert cell.value == "(1, 3, True, True, 0)"


def test_what_cells_do_without_imports_works_in_fresh_workers(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import functools, inspect
        @functools.lru_cache(maxsize=None)
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        def cell_function():
            return "here is its source"
        def work():
            display("shown")
            lines = get_ipython().getoutput("echo from a shell")  # what = ! becomes; IPython 7 cannot on Python 3.12
            return fib(30), inspect.getsource(cell_function).splitlines()[1].strip(), list(lines)
        notebook_launcher(work, num_processes=2, start_method="fresh", output="first")
        """
    ).ok()
    assert cell.value == "(832040, 'return \"here is its source\"', ['from a shell'])"
    assert cell.displays[0]["text/plain"] == "'shown'"


def test_devices_of_standard_output_can_be_opened(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import subprocess
        def write():
            with open("/dev/stdout", "w") as out: out.write("opened\\n")
            subprocess.run("echo shell > /dev/stderr", shell=True, check=True)
        notebook_launcher(write, num_processes=2)
        """
    ).ok()
    assert sorted(cell.lines) == ["[0] opened", "[1] opened"]
    assert sorted(cell.stderr.splitlines()) == ["[0] shell", "[1] shell"]


def test_getpass_does_not_ask_through_the_kernels_sockets(kernel: Kernel) -> None:
    cell = kernel.run(
        "import getpass; notebook_launcher(lambda: getpass.getpass(), num_processes=2)", timeout=120
    )
    assert cell.error is not None and cell.error[0] == "EOFError"


def test_tqdm_write_between_nested_bars(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from tqdm import tqdm
        def nested():
            for i in tqdm(range(2), desc="outer"):
                for j in tqdm(range(3), desc="inner", leave=None):
                    tqdm.write(f"note {i} {j}")
        notebook_launcher(nested, num_processes=2, output="first")
        """
    ).ok()
    assert cell.lines == [f"note {i} {j}" for i in range(2) for j in range(3)]
    assert cell.stderr == ""
    assert [data["text/plain"][:12] for data in cell.displays] == ["outer: 100%|", "", ""]


def test_errors_with_odd_attributes(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def odd():
            error = ValueError("text")
            error.__notes__ = 5
            error.loss = torch.ones(3)
            raise error
        try: notebook_launcher(odd, num_processes=2)
        except ValueError as error: print("caught", error, error.loss.sum().item())
        """
    ).ok()
    assert "caught text 3.0" in cell.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_parts_of_an_exception_group_show_their_lines(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import traceback
        def several():
            found = []
            for text in "ab":
                try: raise KeyError(text)  # one of them
                except KeyError as error: found.append(error)
            raise ExceptionGroup("both", found)
        try: notebook_launcher(several, num_processes=2)
        except* KeyError as group: print("".join(traceback.format_exception(group)))
        """
    ).ok()
    assert cell.stdout.count("raise KeyError(text)  # one of them") == 2


@pytest.mark.once
def test_a_value_that_cannot_be_made_again_is_named(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        class Odd(Exception):
            def __init__(self, a, b): super().__init__(a)
        notebook_launcher(lambda: Odd(1, 2), num_processes=2)
        """
    )
    assert cell.error is not None and cell.error[0] == "ShipError"
    assert "the value that rank 0 returned cannot be made again" in cell.error[1]


def test_a_working_directory_that_is_gone(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.run(
        """
        import tempfile
        folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)
        notebook_launcher(lambda: 1, num_processes=2, start_method="fork")
        """
    ).ok()
    assert cell.value == "1"
    cell = fresh_kernel.run("notebook_launcher(lambda: 1, num_processes=2, start_method='fresh')")
    assert cell.error is not None and "change to another with os.chdir" in cell.error[1]


@pytest.mark.once
@pytest.mark.parametrize("close", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_standard_streams(tmp_path: Path, close: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from notebook_accel import notebook_launcher\n"
        "def work(): print('x'); return int(os.environ['RANK']) + 7\n"
        f"open({str(tmp_path / 'result')!r}, 'w').write(str(notebook_launcher(work, num_processes=2)))\n"
    )
    subprocess.run(["bash", "-c", f"{sys.executable} {script} {close}"], timeout=120, check=True)
    assert (tmp_path / "result").read_text() == "7"


@pytest.mark.once
def test_an_ascii_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from notebook_accel import notebook_launcher\n"
        "notebook_launcher(lambda: print('caf\\u00e9'), num_processes=2)\n"
    )
    command = f"PYTHONIOENCODING=ascii {sys.executable} {script}"
    done = subprocess.run(["bash", "-c", command], timeout=120, check=True, capture_output=True, text=True)
    assert "[0] caf\\xe9" in done.stdout


def test_an_interrupt_while_the_agent_imports(fresh_kernel: Kernel) -> None:
    def interrupt() -> None:
        time.sleep(0.5)
        fresh_kernel.interrupt()

    cell = fresh_kernel.run(
        "print('go', flush=True)\n"
        "notebook_launcher(time.sleep, (50,), num_processes=2, start_method='fresh')",
        during=interrupt,
    )
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt"
    assert "Traceback" not in cell.stderr
    again = fresh_kernel.run("notebook_launcher(lambda: 1, num_processes=2, start_method='fresh')").ok()
    assert again.value == "1"


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_processes_of_a_function_are_waited_for(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        import multiprocessing, pathlib
        folder = pathlib.Path("waited for by {method}"); folder.mkdir()
        def start():
            def late():
                time.sleep(0.5)
                (folder / os.environ["RANK"]).touch()
            multiprocessing.get_context("fork").Process(target=late).start()
        notebook_launcher(start, num_processes=2, start_method="{method}")
        sorted(path.name for path in folder.iterdir())
        """
    ).ok()
    assert cell.value == "['0', '1']"


@pytest.mark.once
@pytest.mark.parametrize("method", METHODS_ONCE)
def test_after_a_reset(fresh_kernel: Kernel, method: str) -> None:
    """IPython's %reset takes away what Python itself has put into the module, and multiprocessing needs some of it."""
    fresh_kernel.run("%reset -f").ok()
    cell = fresh_kernel.run(
        f"""
        from notebook_accel import Session, notebook_launcher
        value = notebook_launcher(lambda: 7, num_processes=2, start_method="{method}")
        with Session(2, start_method="{method}") as session:
            values = session.run(lambda: 3, returns="all")
        value, values
        """
    ).ok()
    assert cell.value == "(7, [3, 3])"


@pytest.mark.once
def test_a_prepared_model_is_returned_without_its_wrapper(kernel: Kernel) -> None:
    kernel.run(
        """
        def train(unwraps):
            from notebook_accel import Accelerator
            accelerator = Accelerator(cpu=True)
            model = accelerator.prepare(torch.nn.Linear(2, 1))
            return accelerator.unwrap_model(model) if unwraps else [model]
        """
    ).ok()
    cell = kernel.run("notebook_launcher(train, (False,), num_processes=2)")
    assert cell.error is not None and cell.error[0] == "ShipError"
    assert "return accelerator.unwrap_model(model)" in cell.error[1], cell.error[1]
    assert "Linear" in (kernel.run("notebook_launcher(train, (True,), num_processes=2)").ok().value or "")


@pytest.mark.once
def test_workers_keep_no_port_of_the_kernels(kernel: Kernel) -> None:
    """A kernel that is started anew takes the same ports, also where a worker of the one before is still ending."""
    cell = kernel.run(
        """
        import psutil, socket
        from ipykernel.connect import get_connection_info

        mine = socket.create_server(("127.0.0.1", 0))
        ports = {port for name, port in get_connection_info(unpack=True).items() if name.endswith("_port")}

        def count_ports():
            own = psutil.Process()
            connections = own.net_connections() if hasattr(own, "net_connections") else own.connections()
            listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
            found = {each.laddr.port for each in listening}
            return len(found & ports), mine.getsockname()[1] in found

        notebook_launcher(count_ports, num_processes=2, returns="all", start_method="fork"), count_ports()
        """
    ).ok()
    assert cell.value == "([(0, True), (0, True)], (5, True))", "what is the user's own stays"


@pytest.mark.once
def test_pools_and_loaders_of_cells_where_forks_are_not_the_default(fresh_kernel: Kernel) -> None:
    """As in Python 3.14, also after something has asked for the method."""
    cell = fresh_kernel.run(
        """
        import multiprocessing, multiprocessing.context
        from notebook_accel.launch import children
        from concurrent.futures import ProcessPoolExecutor
        from torch.utils.data import DataLoader, Dataset
        found = multiprocessing.context._default_context
        found._default_context = multiprocessing.get_context("forkserver")
        children._PLATFORMS = "forkserver"
        class Squares(Dataset):
            def __len__(self): return 4
            def __getitem__(self, index): return index * index
        def square(number): return number * number
        def use():
            with multiprocessing.Pool(2) as pool, ProcessPoolExecutor(2) as executor:
                squares = pool.map(square, [2, 3]), list(executor.map(square, [4]))
            return squares, sum(batch.item() for batch in DataLoader(Squares(), num_workers=2))
        values = [notebook_launcher(use, num_processes=count) for count in (1, 2)]
        print(multiprocessing.get_start_method())
        str(values + [notebook_launcher(use, num_processes=count) for count in (1, 2)])
        """,
        timeout=120,
    ).ok()
    assert cell.value == repr(str([(([4, 9], [16]), 14)] * 4)) and cell.lines == ["forkserver"]
