"""Walking nested data."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel import nested

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Any
    note: str = "n"


class Movable:
    def __init__(self) -> None:
        self.device: Any = None

    def to(self, device: Any) -> Movable:  # no non_blocking, as users write it
        self.device = device
        return self


def trees() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.integers(), st.none(), st.text(max_size=2), st.builds(lambda n: torch.arange(n), st.integers(0, 4))
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), inner, max_size=3),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
            inner.map(Output),
        ),
        max_leaves=8,
    )


@given(trees())
@settings(max_examples=80, deadline=None)
def test_flatten_and_rebuild_are_inverse(tree: Any) -> None:
    flat = nested.flatten(tree)
    again = nested.flatten(flat.rebuild(flat.leaves))
    assert [type(leaf) for leaf in again.leaves] == [type(leaf) for leaf in flat.leaves]
    assert all(a is b for a, b in zip(again.leaves, flat.leaves, strict=True))
    assert again.paths() == flat.paths()


@given(trees())
@settings(max_examples=80, deadline=None)
def test_paths_lead_to_the_leaves(tree: Any) -> None:
    flat = nested.flatten(tree)
    for path, leaf in zip(flat.paths("tree"), flat.leaves, strict=True):
        assert eval(path, {"tree": tree}) is leaf


def test_rebuild_refuses_another_number_of_leaves() -> None:
    with pytest.raises(ValueError, match="1 leaves given != 2 leaves"):
        nested.flatten([1, 2]).rebuild([3])


def test_containers_keep_their_types() -> None:
    tree: dict[str, Any] = {
        "pair": Pair(torch.zeros(1), [1]),
        "ordered": OrderedDict(a=torch.zeros(1)),
        "default": defaultdict(list, a=torch.zeros(1)),
        "user": UserDict(a=torch.zeros(1)),
        "record": Output(torch.zeros(1)),
        "result": torch.max(torch.eye(2), dim=0),
    }
    after = nested.recursively_apply(lambda tensor: tensor + 1, tree)
    assert {key: type(value) for key, value in after.items()} == {k: type(v) for k, v in tree.items()}
    assert after["pair"].left.item() == after["record"].logits.item() == after["user"]["a"].item() == 1
    assert after["default"]["missing"] == []
    assert tree["record"].logits.item() == 0


def test_recursively_apply_leaves_or_refuses_other_leaves() -> None:
    assert nested.recursively_apply(lambda x: 0, ["a", torch.zeros(1)]) == ["a", 0]
    with pytest.raises(TypeError, match="found str"):
        nested.recursively_apply(lambda x: x, ["a"], error_on_other_type=True)
    assert nested.recursively_apply(lambda x, y: x + y, [1, "a"], 2, test_type=lambda x: x == 1) == [3, "a"]


def test_send_to_device_moves_tensors_and_objects_but_no_skipped_keys() -> None:
    movable = Movable()
    batch: dict[str, Any] = {
        "x": torch.zeros(2),
        "skip": torch.zeros(2),
        "deep": [Output(torch.zeros(1)), movable],
    }
    moved = nested.send_to_device(batch, "meta", non_blocking=True, skip_keys="skip")
    assert moved["x"].device.type == moved["deep"][0].logits.device.type == "meta"
    assert moved["skip"].device.type == "cpu"
    assert movable.device == "meta"
    assert batch["x"].device.type == "cpu"


def test_find_batch_size() -> None:
    assert nested.find_batch_size({"a": [torch.zeros(3, 2)], "b": torch.zeros(5)}) == 3
    assert nested.find_batch_size(Output(torch.zeros(4))) == 4
    with pytest.raises(ValueError, match="empty dict"):
        nested.find_batch_size({})
    with pytest.raises(TypeError, match="not in str"):
        nested.find_batch_size(["a"])
    assert nested.ignorant_find_batch_size(["a"]) is None


def test_concatenate_slice_and_listify() -> None:
    batches = [{"x": torch.ones(2), "y": (torch.zeros(1),)}, {"x": torch.zeros(1), "y": (torch.ones(1),)}]
    joined = nested.concatenate(batches)
    assert nested.listify(joined) == {"x": [1, 1, 0], "y": ([0, 1],)}
    assert nested.listify(nested.slice_tensors(joined, slice(1, 2))) == {"x": [1], "y": ([1],)}
    assert nested.concatenate(["alone"]) == "alone"
    with pytest.raises(TypeError, match="str cannot"):
        nested.concatenate(["a", "b"])
    assert nested.listify(torch.ones(1, dtype=torch.bfloat16)) == [1.0]


def test_convert_to_fp32_touches_half_precision_only() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int64]
    converted = nested.convert_to_fp32([torch.ones(1, dtype=dtype) for dtype in dtypes])
    assert [t.dtype for t in converted] == [torch.float32, torch.float32, torch.float64, torch.int64]


def test_same_results_as_accelerate() -> None:
    reference = pytest.importorskip("accelerate.utils.operations")
    data = {"x": Pair(torch.arange(3), [torch.ones(2, 2)]), "y": 3}
    for function in ("find_batch_size", "listify", "convert_to_fp32"):
        ours, theirs = getattr(nested, function)(data), getattr(reference, function)(data)
        assert str(ours) == str(theirs), function
    ours, theirs = (m.concatenate([data["x"], data["x"]]) for m in (nested, reference))
    assert str(ours) == str(theirs)


def test_leaves_by_key_do_not_depend_on_when_keys_were_set() -> None:
    one = {"b": 1, "a": {"y": 2, "x": 3}}
    other = OrderedDict(a=UserDict(x=3, y=2), b=1)
    assert nested.leaves_of(one) == [1, 2, 3]
    assert nested.leaves_of(one, by_key=True) == nested.leaves_of(other, by_key=True) == [3, 2, 1]
    assert list(nested.refill(one, [30, 20, 10]).items()) == [("b", 10), ("a", {"y": 20, "x": 30})]
    mixed = {"b": 1, 2: 3, None: 4}
    assert nested.leaves_of(mixed, by_key=True) == [1, 3, 4], "keys without an order stay as they are"
