"""A launch never asks for a kernel restart, whatever was used in the kernel before."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.conftest import IMPORTS
from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def threaded_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose torch uses four OpenMP threads."""
    started = Kernel(tmp_path_factory.mktemp("kernel"), OMP_NUM_THREADS="4")
    yield started
    started.close()


@pytest.fixture
def plain_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel that has not imported torch's compiler: no copy of a process that has."""
    started = Kernel(tmp_path)
    started.run(IMPORTS).ok()
    yield started
    started.close()


TRAIN = """
def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model(torch.randn(512, 256)).pow(2).mean().backward()
    return torch.get_num_threads(), model[0].weight.grad.norm().item()
"""


@pytest.mark.not_on("darwin", "kernels are not forked")
def test_a_clean_kernel_is_forked_and_a_used_one_is_not(threaded_kernel: Kernel) -> None:
    kernel = threaded_kernel
    kernel.run("import os, torch; from notebook_accel import notebook_launcher\n" + TRAIN).ok()
    clean = kernel.run("first = notebook_launcher(train, num_processes=2); first").ok()
    assert "(forked)" in clean.stdout
    assert "(4," in clean.value, "the user's OMP_NUM_THREADS holds in the workers"
    kernel.run("train()").ok()  # backward in the kernel
    used = kernel.run("notebook_launcher(train, num_processes=2) == first", timeout=120).ok()
    assert "(fresh)" in used.stdout
    assert used.value == "True"
    again = kernel.run("notebook_launcher(train, num_processes=2) == first", timeout=120).ok()
    assert again.value == "True"


def test_fork_in_a_used_kernel_is_refused_with_the_reason(threaded_kernel: Kernel) -> None:
    kernel = threaded_kernel
    kernel.run("import os, torch; from notebook_accel import notebook_launcher\n" + TRAIN + "train()").ok()
    cell = kernel.run("notebook_launcher(train, num_processes=2, start_method='fork')")
    assert cell.error is not None and cell.error[0] == "ValueError"
    assert "OpenMP" in cell.error[1] and "choose 'auto'" in cell.error[1]


CARRIED = """
import types
import accelerate
from notebook_accel import Accelerator
theirs = accelerate.Accelerator()
config = types.SimpleNamespace(accelerator=Accelerator(), state=theirs.state, raw=torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(config.raw.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(range(4))
_, *config.prepared = config.accelerator.prepare(config.raw, optimizer, schedule, loader)
def carry(use=lambda config: config.raw(torch.ones(1, 1)).shape[0]):
    made = accelerate.Accelerator().num_processes, Accelerator().num_processes
    return made, config.state.num_processes, use(config), repr(config.accelerator)
"""
USES = {
    "config.accelerator.prepare(1)": "this is an Accelerator of another process, made in cell In[3], "
    "line 5 (config =",
    "config.accelerator.step": "make it inside the function that is launched",
    "theirs.device": "this is an Accelerator of another process; it stays",
    "config.prepared[0].step()": "this SGD was prepared in a run of 1 process by the Accelerator of a cell, line 5",
    "config.prepared[1].step()": "this StepLR was prepared in a run of 1 process",
    "list(config.prepared[2])": "this DataLoaderShard was prepared in a run of 1 process",
}


@pytest.mark.once
def test_what_was_made_in_the_kernel_is_carried_and_not_used(fresh_kernel: Kernel) -> None:
    """Each rank would train alone, with the state of the kernel's one process."""
    pytest.importorskip("accelerate")
    fresh_kernel.run(CARRIED).ok()
    cell = fresh_kernel.run("notebook_launcher(carry, num_processes=2)").ok()
    assert "((2, 2)," in cell.value and "<this is an Accelerator of another process" in cell.value
    for use, message in USES.items():
        cell = fresh_kernel.run(f"notebook_launcher(carry, (lambda config: {use},), num_processes=2)")
        assert cell.error is not None and cell.error[0] == "RuntimeError" and message in cell.error[1], use
    cell = fresh_kernel.run(
        "config.accelerator.num_processes, len(list(config.prepared[2])), config.prepared[0].step()"
    )
    assert cell.ok().value == "(1, 4, None)", "here they are as before"


@pytest.mark.once
def test_after_an_accelerator_in_the_kernel(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.run(
        """
        from notebook_accel import Accelerator
        mine = Accelerator(mixed_precision="bf16")
        def ranks():
            accelerator = Accelerator()
            return accelerator.num_processes, accelerator.mixed_precision
        notebook_launcher(ranks, num_processes=2), mine.num_processes, mine.mixed_precision
        """
    ).ok()
    assert cell.value == "((2, 'no'), 1, 'bf16')"
    assert "(fresh)" in cell.stdout
    # the same in one process: the notebook's own accelerator comes back afterwards
    cell = fresh_kernel.run("notebook_launcher(ranks, num_processes=1), Accelerator().mixed_precision").ok()
    assert cell.value == "((1, 'no'), 'bf16')"


@pytest.mark.once
def test_after_bitsandbytes_was_imported(fresh_kernel: Kernel) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    cell = fresh_kernel.run(
        """
        import bitsandbytes
        def train():
            layer = bitsandbytes.nn.Linear8bitLt(4, 4)
            return int(os.environ["RANK"])
        notebook_launcher(train, num_processes=2, returns="all")
        """
    ).ok()
    assert cell.value == "[0, 1]"


@pytest.mark.once
def test_after_a_process_group_in_the_kernel(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.run(
        """
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        def size():
            dist.init_process_group("gloo")
            return dist.get_world_size()
        notebook_launcher(size, num_processes=2), dist.get_world_size()
        """
    ).ok()
    assert cell.value == "(2, 1)"


@pytest.mark.not_on("darwin", "kernels are not forked")
def test_while_another_thread_of_the_kernel_prints(fresh_kernel: Kernel) -> None:
    cell = fresh_kernel.run(
        """
        import threading
        stop = threading.Event()
        def chatter():
            while not stop.is_set(): print("chatter", file=sys.stderr)
        thread = threading.Thread(target=chatter); thread.start()
        try:
            results = [notebook_launcher(lambda: os.environ["RANK"], num_processes=2) for _ in range(40)]
        finally:
            stop.set(); thread.join()
        set(results)
        """,
        timeout=240,
    ).ok()
    assert cell.value == "{'0'}"
    assert "(forked)" in cell.stdout


@pytest.mark.once
@pytest.mark.parametrize("word", ["1", "true", "YES", "On"])
def test_the_debug_mode_makes_a_dry_launch_first(kernel: Kernel, word: str) -> None:
    cell = kernel.run(
        f"""
        os.environ["ACCELERATE_DEBUG_MODE"] = "{word}"
        try:
            notebook_launcher(lambda: print("the real one"), num_processes=2)
        finally:
            del os.environ["ACCELERATE_DEBUG_MODE"]
        """
    ).ok()
    dry = [line for line in cell.lines if line.startswith("dry launch: rank")]
    assert len(dry) == 2 and "rank 0 of 2, cpu, gloo" in dry[0]
    assert cell.lines.index(dry[1]) < cell.lines.index("[0] the real one")


@pytest.mark.once
def test_the_debug_mode_is_off_by_a_false_word_and_names_nonsense(kernel: Kernel) -> None:
    run = "os.environ['ACCELERATE_DEBUG_MODE'] = '{}'\nnotebook_launcher(print, num_processes=2)"
    cell = kernel.run(run.format("off")).ok()
    assert "dry launch" not in cell.stdout
    cell = kernel.run(run.format("maybe"))
    kernel.run("del os.environ['ACCELERATE_DEBUG_MODE']").ok()
    assert cell.error is not None and "ACCELERATE_DEBUG_MODE" in cell.error[1] and "'maybe'" in cell.error[1]


@pytest.mark.once
def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "from notebook_accel import notebook_launcher\n"
        "class Mine(Exception): pass\n"
        "def train():\n"
        "    if os.environ['RANK'] == '1': raise Mine('x')\n"
        "for method in ('fork', 'fresh'):\n"
        "    try: notebook_launcher(train, num_processes=2, start_method=method)\n"
        "    except Mine as error: print('caught', method)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    found = [line for line in done.stdout.splitlines() if line.startswith("caught")]
    assert found == ["caught fork", "caught fresh"], done.stderr


@pytest.mark.once
@pytest.mark.parametrize("variables", [{}, {"LC_TIME": "C"}], ids=["by a fork of the agent", "by exec"])
def test_workers_have_the_flags_of_python(variables: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from notebook_accel import notebook_launcher\n"
        "def tell(): return sys.flags.no_user_site\n"
        f"print('told', notebook_launcher(tell, num_processes=2, start_method='fresh', environment={variables}))"
    )
    done = subprocess.run([sys.executable, "-s", "-c", code], capture_output=True, text=True, timeout=240)
    assert "told 1\n" in done.stdout, done.stderr


OPTIMIZE = """
def has_compiler():
    return "torch._dynamo" in sys.modules
def optimize():
    had = has_compiler()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return had
"""


@pytest.mark.once
@pytest.mark.not_on("darwin", "kernels are not forked")
def test_the_compiler_is_imported_once_for_all_forks(plain_kernel: Kernel) -> None:
    run = "notebook_launcher({}, num_processes=2, returns='all'), has_compiler()"
    # in one cell: the kernel imports the compiler once it is idle beside a function that trains
    cell = plain_kernel.run(OPTIMIZE + run.format("has_compiler")).ok()
    assert cell.value == "([False, False], False)", "a function without an optimizer waits for nothing"
    environment = plain_kernel.run("dict(os.environ)").value
    for _ in range(2):
        cell = plain_kernel.run(run.format("optimize")).ok()
        assert cell.value == "([True, True], True)"
        assert "(forked)" in cell.stdout
    assert plain_kernel.run("dict(os.environ)").value == environment
    # nor does an optimizer in the kernel itself keep it from being forked
    plain_kernel.run("optimize()").ok()
    assert "(forked)" in plain_kernel.run("notebook_launcher(optimize, num_processes=2)").ok().stdout


@pytest.mark.once
def test_fresh_workers_find_the_compiler_where_their_function_trains(plain_kernel: Kernel) -> None:
    run = "[notebook_launcher({}, num_processes=2, start_method='fresh') for _ in range(2)], has_compiler()"
    cell = plain_kernel.run(OPTIMIZE + run.format("has_compiler")).ok()
    assert cell.value == "([False, False], False)"
    cell = plain_kernel.run(run.format("optimize")).ok()
    assert cell.value == "([True, True], False)", "the kernel itself has no use for it"
