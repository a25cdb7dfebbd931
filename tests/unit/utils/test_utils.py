"""The small functions that are served under Accelerate's names do what they do there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_accel import probes
from notebook_accel import utils as public
from notebook_accel.data_loader.samplers import get_sampler
from notebook_accel.utils import constants, libraries, other, registry, structure

reference = pytest.importorskip("accelerate.utils")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


DATA = {"a": torch.ones(2, 3), "b": [torch.zeros(4, dtype=torch.int64), "text"]}
TIED = nn.Linear(2, 2).weight
CASES: dict[str, Callable[[Any], Any]] = {
    "convert_bytes": lambda own: [own.convert_bytes(size) for size in (3, 2048, 5 * 2**20, 7.5 * 2**60)],
    "str_to_bool": lambda own: [own.str_to_bool(word) for word in ("Y", "on", "0", "False")],
    "str_to_bool, bool": lambda own: own.str_to_bool("t", to_bool=True),
    "get_int_from_env": lambda own: own.get_int_from_env(["NO_SUCH_VARIABLE"], 7),
    "parse_choice_from_env": lambda own: own.parse_choice_from_env("NO_SUCH_VARIABLE"),
    "parse_flag_from_env": lambda own: own.parse_flag_from_env("NO_SUCH_VARIABLE", True),
    "are_libraries_initialized": lambda own: own.are_libraries_initialized("torch", "no_such_library"),
    "merge_dicts": lambda own: own.merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}),
    "recursive_getattr": lambda own: own.recursive_getattr(Block(), "inner.training"),
    "is_repeated_blocks": lambda own: [
        own.is_repeated_blocks(Block()),
        own.is_repeated_blocks(Block().inner),
    ],
    "has_repeated_blocks": lambda own: [
        own.has_repeated_blocks(Block()),
        own.has_repeated_blocks(nn.Linear(1, 1)),
    ],
    "model_has_dtensor": lambda own: own.model_has_dtensor(Block()),
    "get_pretty_name": lambda own: [own.get_pretty_name(item) for item in (Block, Block(), CASES["tp"])],
    "tp": lambda own: own.get_model_tp_size(Block()),
    "get_module_class_from_name": lambda own: [
        own.get_module_class_from_name(Block(), name) for name in ("Linear", "Block", "Conv2d")
    ],
    "get_shape": lambda own: own.get_shape({"a": DATA["a"]}),
    "is_fp8": lambda own: own.is_fp8_available(),
    "is_bnb": lambda own: [  # where bitsandbytes is not installed, Accelerate returns None
        bool(answer)
        for answer in (own.is_bnb_available(), own.is_bnb_available("99"), own.is_8bit_bnb_available())
    ],
}


class Ours:
    """The names of several modules together."""

    def __getattr__(self, name: str) -> Any:
        return next(
            getattr(module, name) for module in (other, structure, libraries) if hasattr(module, name)
        )


class Theirs:
    """The same of Accelerate, which has them in several modules too."""

    def __getattr__(self, name: str) -> Any:
        modules = (
            reference,
            reference.other,
            reference.dataclasses,
            reference.environment,
            reference.operations,
        )
        return next(getattr(module, name) for module in modules if hasattr(module, name))


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_accelerate(case: str) -> None:
    assert CASES[case](Ours()) == CASES[case](Theirs())


@pytest.mark.parametrize("name", [name for name in vars(constants) if name.isupper()])
def test_constants_are_those_of_accelerate(name: str) -> None:
    assert getattr(constants, name) == getattr(reference.constants, name)


@pytest.mark.parametrize("name", [name for name in vars(libraries) if name.startswith("is_")])
def test_probes_take_what_accelerates_take(name: str) -> None:
    import inspect

    theirs = inspect.signature(getattr(reference.imports, name)).parameters
    assert not set(theirs) - set(inspect.signature(getattr(libraries, name)).parameters)


def test_weights_for_safetensors_have_one_name_for_each_memory() -> None:
    found = other.clean_state_dict_for_safetensors({"a": TIED, "b": TIED, "c": DATA["a"].T, "d": "text"})
    assert sorted(found) == ["a", "c", "d"] and found["c"].is_contiguous()


def test_tensors_are_made_again_from_their_structure() -> None:
    data = {"a": DATA["a"], "b": [torch.tensor(1), "text"]}
    wanted = structure.get_data_structure(data)
    assert wanted["a"] == structure.TensorInformation(torch.Size([2, 3]), torch.float32)
    made = structure.initialize_tensors(wanted)
    assert isinstance(made["a"], torch.Tensor) and made["b"][1] == "text"
    assert structure.get_data_structure(made) == wanted
    assert structure.find_device(DATA) == torch.device("cpu") and structure.find_device(["text"]) is None


@pytest.mark.parametrize("text", ["", " ", "maybe"])
def test_other_words_are_neither_true_nor_false(text: str) -> None:
    with pytest.raises(ValueError, match="neither true"):
        other.str_to_bool(text)


def test_bars_are_for_the_first_process_and_named_arguments() -> None:
    with pytest.raises(ValueError, match="main_process_only=True"):
        public.tqdm(True, [1])


def test_a_config_is_read_under_accelerates_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_processes: 3\nmixed_precision: bf16\n")
    found = registry.load_config_from_file(path)
    assert found.num_processes == 3 and found.to_dict()["mixed_precision"] == "bf16"


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sampler_of_a_loader_is_that_which_accelerate_finds(shuffle: bool) -> None:
    from accelerate.data_loader import get_sampler as theirs

    loader = DataLoader(list(range(4)), batch_size=2, shuffle=shuffle)
    assert get_sampler(loader) is theirs(loader) is loader.sampler
    plain = DataLoader(list(range(4)), sampler=loader.batch_sampler, batch_size=None)
    assert get_sampler(plain) is theirs(plain) is loader.sampler


@pytest.mark.usefixtures("clean_runtime")
def test_parameters_are_whole_without_deepspeed() -> None:
    weight = nn.Linear(2, 2).weight
    with structure.GatheredParameters([weight]):
        assert weight.shape == (2, 2)


def test_nested_state_is_moved() -> None:
    moved = other.move_to_device({"a": [DATA["a"]], "step": 3}, "meta")
    assert moved["a"][0].device.type == "meta" and moved["step"] == 3


def test_a_variable_says_that_torch_xla_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: name == "torch_xla")
    for text, found in (("0", False), ("false", False), ("1", True)):
        monkeypatch.setenv("USE_TORCH_XLA", text)
        assert public.is_torch_xla_available() is found
    monkeypatch.delenv("USE_TORCH_XLA")
    assert public.is_torch_xla_available()
