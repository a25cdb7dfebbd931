"""Options that are set after they were made, as libraries do, count and are checked."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, DataLoaderConfiguration, handlers
from notebook_accel.data_loader.base import PreparedLoader


def test_a_field_that_is_set_counts(clean_runtime: None) -> None:
    config = DataLoaderConfiguration()
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    config.data_seed, config.use_seedable_sampler = 7, True
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    first = [batch.tolist() for batch in loader]
    again = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    )
    other = again.prepare(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    assert [batch.tolist() for batch in other] == first
    assert isinstance(loader, PreparedLoader) and loader.base_dataloader is loader


def test_what_is_set_is_checked_as_by_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataLoaderConfiguration()
    with pytest.raises(AttributeError, match="no field 'seed', its fields are split_batches"):
        config.seed = 3  # type: ignore[attr-defined]
    monkeypatch.setattr(handlers, "at_least", lambda name, minimum: False)
    with pytest.raises(ImportError, match="use_stateful_dataloader=True needs torchdata"):
        config.use_stateful_dataloader = True
    assert not config.use_stateful_dataloader
    with pytest.raises(ImportError, match="use_stateful_dataloader=True needs torchdata"):
        DataLoaderConfiguration(use_stateful_dataloader=True)
