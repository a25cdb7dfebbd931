"""Trainer in its breadth, on this package and on Accelerate: the same logs, metrics, weights and files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.libraries import sides
from tests.libraries.trainer.launching import Results, serve

sides.skip_without("accelerate", "datasets", "optuna")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODULES = ("training_cases", "loading_cases", "evaluation_cases")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, served_by: sides.Hosts) -> dict[str, Results]:
    """What all runs found, by their names."""
    folder = tmp_path_factory.mktemp("trainer")

    def run(name: str) -> Results:
        # Accelerate's dispatcher, left in the middle of an epoch, now and then breaks a later gather of two processes
        return serve(folder, served_by, name, MODULES, attempts=2 if name == "theirs2" else 1)

    return sides.on_both_sides(sides.RUNS, run)


def check_stream(found: dict[str, Any]) -> None:
    """Accelerate counts samples that fill batches up where a data set has no length."""
    assert found["evaluated"][0]["eval_samples"] == 10


def check_resumed(found: dict[str, Any]) -> None:
    """Accelerate skips other batches than it has read where rank 0 reads for all."""
    whole, again = ([words for words, *_ in found[run]["seen"]] for run in ("whole", "again"))
    assert again == whole[3:]


def check_lengths(found: dict[str, Any]) -> None:
    """Accelerate lets each process shuffle with its own random state; here rank 0 says how."""
    assert found["step"] == 8 and all(words != [] for words, _ in found["seen"])


def check_share(found: dict[str, Any]) -> None:
    """Accelerate shares out the share of rank 0, a quarter of the rows for each; here each process sees its own."""
    rows = {tuple(row) for words, *_ in found["seen"] if words != "evaluation" for row in words}
    assert len(rows) in (10, 11)


DIFFERENT: dict[str, Callable[[dict[str, Any]], None]] = {
    "stream_not_dispatched": check_stream,
    "resumed_dispatched": check_resumed,
    "by_length": check_lengths,
    "table_split_by_node": check_share,
}
"""Cases that two processes do in another way here, and what is right about it."""


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("number", [1, 2])
def test_trainer_does_the_same(number: int, module: str, done: dict[str, Results]) -> None:
    for ours, theirs in zip(done[f"ours{number}"], done[f"theirs{number}"], strict=True):
        assert len(ours[module]) > 20 and ours[module].keys() == theirs[module].keys()
        assert [name for name, case in theirs[module].items() if "error" in case] == []
        same = [name for name in ours[module] if number == 1 or name not in DIFFERENT]
        differ = [name for name in same if ours[module][name] != theirs[module][name]]
        assert differ == [], (ours[module][differ[0]], theirs[module][differ[0]])


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_right(name: str, done: dict[str, Results]) -> None:
    for ours, theirs in zip(done["ours2"], done["theirs2"], strict=True):
        DIFFERENT[name](ours["loading_cases"][name]["found"])
        assert ours["loading_cases"][name] != theirs["loading_cases"][name]


def test_rank_0_groups_by_length_as_on_accelerate(done: dict[str, Results]) -> None:
    ours, theirs = (done[name][0]["loading_cases"]["by_length"]["found"] for name in ("ours2", "theirs2"))
    assert ours["seen"] == theirs["seen"]
    assert ours["log"][:4] == theirs["log"][:4], "in the first epoch the ranks' random states are alike"
