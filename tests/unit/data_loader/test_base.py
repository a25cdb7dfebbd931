"""What all prepared loaders have: the members of Accelerate's, and iterations that are begun and ended by hand."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from notebook_accel import data_loader
from notebook_accel.data_loader import prepare_data_loader


@pytest.mark.parametrize("name", ["DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader"])
def test_loaders_have_the_members_of_accelerates(name: str) -> None:
    theirs = getattr(pytest.importorskip("accelerate.data_loader"), name)
    ours = getattr(data_loader, name)
    members = {member for member in dir(theirs) if not member.startswith("_")} - {"base_dataloader"}
    assert members <= set(dir(ours)), members - set(dir(ours))


def test_an_iteration_can_be_begun_and_ended_by_hand() -> None:
    loader = prepare_data_loader(DataLoader(list(range(4)), batch_size=2))
    loader.begin()
    assert loader.epoch_state.current is not None
    loader.end()
    assert loader.epoch_state.current is None
