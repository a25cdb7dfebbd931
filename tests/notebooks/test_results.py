"""What a launch returns, and what reaches the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.kernel import METHODS, METHODS_ONCE, Kernel

pytestmark = pytest.mark.notebook


@pytest.mark.parametrize("method", METHODS)
def test_functions_lambdas_and_classes_of_cells(kernel: Kernel, method: str) -> None:
    kernel.run(
        """
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
            def double(self): return Point(self.x * 2)
        def helper(point): return point.double()
        """
    ).ok()
    cell = kernel.run(
        f"""
        made = Point(21)
        result = notebook_launcher(lambda p, n: (helper(p), made, n), (Point(4), 3), num_processes=2,
                                   start_method="{method}")
        result, isinstance(result[0], Point), type(result[1]) is Point
        """
    ).ok()
    assert cell.value == "((Point(x=8), Point(x=21), 3), True, True)"


def test_a_kernel_that_has_not_imported_torch(tmp_path: Path) -> None:
    fresh = Kernel(tmp_path)  # the fixtures' kernels are copies of a process that has
    try:
        cell = fresh.run(
            """
            import sys
            before = "torch" in sys.modules
            from notebook_accel import notebook_launcher
            def rank(): import os; return int(os.environ["RANK"])
            before, notebook_launcher(rank, num_processes=2, returns="all")
            """
        ).ok()
    finally:
        fresh.close()
    assert cell.value == "(False, [0, 1])"


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_returns(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        def rank(): return int(os.environ["RANK"])
        [notebook_launcher(rank, num_processes=3, start_method="{method}", returns=r)
         for r in ("first", "all", "none")]
        """
    ).ok()
    assert cell.value == "[0, [0, 1, 2], None]"


def test_one_process_is_the_kernel(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(os.getpid, num_processes=1) == os.getpid()").ok()
    assert cell.value == "True"
    cell = kernel.run("notebook_launcher(lambda: 5, num_processes=1, returns='all')").ok()
    assert cell.value == "[5]"


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_big_results_and_big_closures(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        import numpy
        big = torch.arange(12_500_000, dtype=torch.float64)  # 100 MB
        view, array = big[:5], numpy.arange(1_000_000)
        def work():
            array[0] = 7  # a worker's own copy
            view[0] = 7
            return big * 2, view, int(array.sum()), big[:5].tolist()
        out, small, total, shared = notebook_launcher(work, num_processes=2, start_method="{method}")
        (torch.equal(out[1:], big[1:] * 2), out[0].item(), small.tolist(), total, shared,
         int(array[0]), big[0].item(), out.device.type)
        """,
        timeout=240,
    ).ok()
    total = sum(range(1_000_000)) + 7
    # a view shares its memory with the whole, in the worker too; the kernel's own are untouched
    assert cell.value.replace("\n", "").replace("  ", " ") == (
        f"(True, 14.0, [7.0, 1.0, 2.0, 3.0, 4.0], {total}, [7.0, 1.0, 2.0, 3.0, 4.0], 0, 0.0, 'cpu')"
    )


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_modules_and_state_dicts_come_back(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        def build():
            torch.manual_seed(3)
            model = torch.nn.Linear(4, 4)
            loss = model(torch.ones(1, 4)).sum()
            return model, model.state_dict(), loss
        model, state, loss = notebook_launcher(build, num_processes=2, start_method="{method}")
        (type(model).__name__, torch.equal(model.weight, state["weight"]), model.weight.requires_grad,
         loss.requires_grad)
        """
    ).ok()
    assert cell.value == "('Linear', True, True, False)"


def test_a_closure_that_does_not_pickle_is_named_with_its_path(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        import threading
        class Holder:
            def __init__(self): self.parts = {"good": 1, "bad": [threading.Lock()]}
        holder = Holder()
        def inner(): return holder
        def train(): return inner()
        notebook_launcher(train, num_processes=2, start_method="fresh")
        """
    )
    assert cell.error is not None
    name, text = cell.error
    assert name == "ShipError"
    assert "train -> global inner -> global holder -> attribute parts -> ['bad'] -> [0]" in text
    assert "lock" in text
    assert cell.stdout == "" and not kernel.children(), "nothing has started"


def test_a_result_that_does_not_pickle_is_named(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(lambda: {'a': [(i for i in ())]}, num_processes=2)")
    assert cell.error is not None
    assert cell.error[0] == "ShipError"
    assert "the returned value -> ['a'] -> [0]" in cell.error[1]


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_random_states_do_not_depend_on_the_start_method(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        import random, numpy
        random.seed(5); numpy.random.seed(5); torch.manual_seed(5)
        before = torch.get_rng_state()
        drawn = notebook_launcher(lambda: (random.random(), numpy.random.rand(), torch.rand(1).item()),
                                  num_processes=2, start_method="{method}")
        drawn == (random.random(), numpy.random.rand(), torch.rand(1).item())
        """
    ).ok()
    assert cell.value == "True"


@pytest.mark.parametrize("method", METHODS_ONCE)
def test_mixed_precision_and_ranks_reach_the_accelerator(kernel: Kernel, method: str) -> None:
    cell = kernel.run(
        f"""
        def check():
            from notebook_accel import Accelerator
            a = Accelerator()
            return (a.mixed_precision, a.num_processes, a.process_index, a.local_process_index,
                    a.distributed_type.value, a.gather(torch.tensor([a.process_index])).tolist())
        notebook_launcher(check, num_processes=2, mixed_precision="bf16", returns="all", start_method="{method}")
        """
    ).ok()
    assert cell.value.replace("\n", "") == (
        "[('bf16', 2, 0, 0, 'MULTI_CPU', [0, 1]), ('bf16', 2, 1, 1, 'MULTI_CPU', [0, 1])]"
    )


@pytest.mark.once
def test_plain_torch_distributed_works_too(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def plain():
            dist.init_process_group("gloo")
            total = torch.ones(1) * dist.get_rank()
            dist.all_reduce(total)
            return total.item()
        notebook_launcher(plain, num_processes=3, returns="all")
        """
    ).ok()
    assert cell.value == "[3.0, 3.0, 3.0]"


def test_debug_launcher_gives_each_rank_its_place(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        def place():
            from notebook_accel import PartialState
            state = PartialState()
            return state.num_processes, state.process_index, state.local_process_index, str(state.device)
        debug_launcher(place, num_processes=2), debug_launcher(lambda x: x + 1, (4,))
        """
    ).ok()
    assert cell.value == "((2, 0, 0, 'cpu'), 5)"


def test_the_announcement_is_true(kernel: Kernel) -> None:
    cell = kernel.run("notebook_launcher(print, num_processes=2)").ok()
    assert cell.stdout.startswith("Launching print on 2 CPU processes (")
    cell = kernel.run("notebook_launcher(print)").ok()
    assert cell.stdout.startswith("Launching print on 1 CPU process, this one.")


@pytest.mark.once
def test_ranks_that_leave_at_once_do_not_disturb_the_others(kernel: Kernel) -> None:
    """Nor do ranks that connect while others start: a fork would copy the locks of the store's thread."""
    cell = kernel.run(
        """
        def leave():
            dist.init_process_group("gloo")
            return dist.get_rank()
        [notebook_launcher(leave, num_processes=4, returns="all") for _ in range(60)] == [[0, 1, 2, 3]] * 60
        """
    ).ok()
    assert cell.value == "True"
