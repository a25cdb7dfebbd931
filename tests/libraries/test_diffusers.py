"""diffusers' training loop and pipelines on the take-over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries import sides
from tests.libraries.scripts.diffuse import CASES

sides.skip_without("diffusers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, served_by: sides.Hosts) -> sides.Outcomes:
    """What the script gave on both sides."""
    return sides.run_all("diffuse", tmp_path_factory.mktemp("diffusers"), served_by)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case != "offload weights"])
def test_it_does_the_same(case: str, number: int, done: sides.Outcomes) -> None:
    for found in sides.compare(done[f"ours{number}"], done[f"theirs{number}"], case):
        if case == "train":
            assert (
                found["world"] == number
                and found["is_loaded"]
                and found["is_alike"]
                and len(found["losses"]) >= 3
            )
        elif case == "load":
            assert isinstance(found["plain"][0], float) and found["plain"][0] == found["whole"][0]
        elif case == "offload":
            images = [found["plain"], found["offloaded"][0], found["offloaded"][2], found["removed"][1]]
            assert len(set(images)) == 1 and found["offloaded"][1]["unet"][1] == 1


def test_weights_come_to_the_device_one_by_one(done: sides.Outcomes) -> None:
    for report in done["ours1"]:
        found = report["cases"]["offload weights"]
        assert {*found["images"], found["removed"][1]} == {found["plain"]}
        assert found["places"] == ["meta"] and found["removed"][0][1] == 0


def test_the_command_does_the_same(tmp_path: Path, done: sides.Outcomes) -> None:
    launched = sides.launch("diffuse", tmp_path, 1, "train")
    assert sides.compare(launched, done["theirs1"], "train")
