"""Classes and functions of cells in workers of every kind: pickles by name find them, their instances come back."""

from __future__ import annotations

import pytest

from tests.notebooks.kernel import METHODS, Kernel

pytestmark = pytest.mark.notebook

DEFINE = """
import functools, multiprocessing, pickle
from typing import NamedTuple
from dataclasses import dataclass
import torch
from notebook_accel import Accelerator, PartialState, Session, notebook_launcher
from notebook_accel.utils import gather_object

@dataclass
class Result:
    rank: int

@dataclass(slots=True)
class Slotted:
    loss: float
    step: int = 3

class Pair(NamedTuple):
    first: int
    second: int = 2

class Both(Slotted):
    __slots__ = ("extra", "__dict__")

class Cached:
    count = 3
    @functools.cached_property
    def total(self):
        return self.count * 2

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

class State:
    def __init__(self): self.result = Result(1)
    def state_dict(self): return {"result": self.result}
    def load_state_dict(self, state): self.result = state["result"]

def double(number):
    return 2 * number

@functools.lru_cache(maxsize=None)
def cached_double(number):
    return 2 * number

def use(folder, pair):
    assert pickle.loads(pickle.dumps(pair)) == Pair(1) and pickle.loads(pickle.dumps(cached_double)) is cached_double
    ranks = [result.rank for result in gather_object([Result(PartialState().process_index)])]
    accelerator = Accelerator(project_dir=folder)
    accelerator.save(Net(), f"{folder}/net{accelerator.process_index}.pt")
    accelerator.register_for_checkpointing(State())
    accelerator.save_state(f"{folder}/state")
    accelerator.load_state(f"{folder}/state")
    again = pickle.loads(pickle.dumps([Result, Slotted(0.5), double]))
    assert again == [Result, Slotted(0.5), double]
    with multiprocessing.get_context("fork").Pool(1) as pool:  # others would not have functions of cells
        doubled = pool.map(double, [1, 2])
    both = Both(0.25)
    both.extra, both.other = 1, 2
    return ranks, doubled, Slotted(0.5), both, Cached(), Cached().total, pair

def check(value):
    ranks, doubled, slotted, both, cached, total, pair = value
    assert (ranks, doubled, total) == ([0, 1], [2, 4], 6), value
    assert type(pair) is Pair and pair == (1, 2)
    assert type(slotted) is Slotted and slotted == Slotted(0.5) and not hasattr(slotted, "__dict__")
    assert type(both) is Both and (both.loss, both.step, both.extra, vars(both)) == (0.25, 3, 1, {"other": 2})
    assert type(cached) is Cached and cached.total == 6
    return "as in the notebook"
"""


@pytest.mark.parametrize("method", METHODS)
def test_in_a_launch(kernel: Kernel, tmp_path: object, method: str) -> None:
    kernel.run(DEFINE).ok()
    launch = (
        f"notebook_launcher(use, args=({str(tmp_path)!r}, Pair(1)), num_processes=2, start_method={method!r})"
    )
    assert kernel.run(f"check({launch})").ok().value == "'as in the notebook'"


def test_in_a_session(kernel: Kernel, tmp_path: object) -> None:
    kernel.run(DEFINE).ok()
    cell = kernel.run(
        f"""
        with Session(2) as session:
            found = [check(session.run(use, {str(tmp_path)!r}, Pair(1)))]
            class Result(Result):
                more = 1
            def look():
                return pickle.loads(pickle.dumps(Result(5))).more
            found.append(session.run(look))
            found.append("Result" in session.run(lambda: dir(__import__("__main__"))))
            session.run(lambda: setattr(__import__("__main__"), "arrived", 5))
            session.push(held=Result(7))
            found.append(session.run(lambda: pickle.loads(pickle.dumps(held)).rank))
        found
        """
    ).ok()
    assert cell.value == "['as in the notebook', 1, False, 7]", "variables of the workers are their own"


@pytest.mark.once
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_loader_workers_that_are_no_forks_have_them_too(kernel: Kernel, method: str) -> None:
    kernel.run(DEFINE).ok()
    cell = kernel.run(
        f"""
        from torch.utils.data import DataLoader, Dataset
        def pair_up(items):
            return [Pair(item, double(item)) for item in items]
        class Items(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index
        def load():
            loader = DataLoader(Items(), 2, num_workers=1, collate_fn=pair_up, multiprocessing_context="{method}")
            return [pair for batch in Accelerator(cpu=True).prepare(loader) for pair in batch]
        found = notebook_launcher(load, num_processes=2, returns="all")
        found == [[(0, 0), (1, 2)], [(2, 4), (3, 6)]], {{type(pair) is Pair for rank in found for pair in rank}}
        """
    ).ok()
    assert cell.value == "(True, {True})"
