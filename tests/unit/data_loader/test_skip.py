"""SkipDataLoader: a loader that leaves out its first batches, and goes on where its state was taken."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from notebook_accel.data_loader import SkipDataLoader, skip_first_batches


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_state_is_that_of_its_place(clean_runtime: None) -> None:
    pytest.importorskip("torchdata")
    options: dict[str, Any] = {"batch_size": 4, "use_stateful_dataloader": True}
    first = SkipDataLoader(list(range(32)), 2, **options)
    batches = iter(first)
    assert [next(batches).tolist()[0] for _ in range(2)] == [8, 12]
    state = first.state_dict()
    batches.close()  # type: ignore[attr-defined]
    second = SkipDataLoader(list(range(32)), 2, **options)
    second.load_state_dict(state)
    assert [batch.tolist()[0] for batch in second] == [16, 20, 24, 28]
    assert second.state_dict()["_iterator_finished"]
    assert [batch.tolist()[0] for batch in second] == [8, 12, 16, 20, 24, 28]


@pytest.mark.parametrize("number", ["2", None, 1.5])
def test_a_number_of_batches_is_an_integer(number: Any) -> None:
    with pytest.raises(TypeError, match=f"num_batches={number!r}: an integer is needed"):
        skip_first_batches(DataLoader(list(range(4))), number)


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a DataLoader, prepared or not, not a list"):
        skip_first_batches([1, 2, 3], 1)
