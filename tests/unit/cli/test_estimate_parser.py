"""Tests for the functions of `estimate-memory` that programs call; a stand-in answers for the hub."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands import estimate as reference
from huggingface_hub.utils import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

from notebook_accel.cli import estimate_parser
from notebook_accel.cli.estimate_parser import (
    add_timm_hub_prefix,
    check_has_model,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
    verify_on_hub,
)

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "torch_dtype": "float16",
}
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def answer(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """Let the hub answer so, to both sides."""
    for module in (estimate_parser, reference):
        monkeypatch.setattr(module, "verify_on_hub", lambda repo, token=None: found)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    answer(monkeypatch, SimpleNamespace(library_name="transformers", config={}))
    return str(tmp_path)


@pytest.mark.parametrize(
    "line", ["a/b", "a --dtypes float32 int4 --library_name timm", "a --trust-remote-code"]
)
def test_words_are_read_as_accelerates_parser_reads_them(line: str) -> None:
    theirs = vars(reference.estimate_command_parser().parse_args(line.split()))
    theirs.pop("nondefault", None)
    assert vars(estimate_command_parser().parse_args(line.split())) == theirs


@needs_transformers
def test_the_numbers_are_accelerates(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = estimate_command_parser().parse_args([model])
    assert gather_data(args) == reference.gather_data(args)
    made = create_empty_model(model, None)
    assert {(tensor.device.type, tensor.dtype) for tensor in made.parameters()} == {("meta", torch.float32)}
    estimate_command(args)
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[0].split()[0] == "dtype" and lines[1].startswith("float32") and lines[4].endswith("-")


@needs_transformers
def test_a_folder_without_a_model_is_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    args = estimate_command_parser().parse_args([model])
    for gather in (gather_data, reference.gather_data):
        with pytest.raises(RuntimeError, match="transformers"):
            gather(args)
    answer(monkeypatch, SimpleNamespace(library_name="transformers", config=None))
    for gather in (gather_data, reference.gather_data):
        with pytest.raises(RuntimeError):
            gather(args)


@pytest.mark.parametrize(
    ("found", "library", "error"),
    [
        ("gated", None, OSError),
        ("repo", "transformers", OSError),
        (SimpleNamespace(library_name=None), None, ValueError),
        (SimpleNamespace(), None, ValueError),
        (SimpleNamespace(library_name="keras"), None, ValueError),
    ],
)
def test_errors_are_accelerates(
    monkeypatch: pytest.MonkeyPatch, found: Any, library: str | None, error: type[Exception]
) -> None:
    answer(monkeypatch, found)
    for create in (create_empty_model, reference.create_empty_model):
        with pytest.raises(error, match=r"a/b|keras") as caught:
            create("a/b", library)
        assert check_has_model(caught.value) == "unknown"


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, SimpleNamespace(library_name="timm"))
    monkeypatch.setattr(estimate_parser.probes, "is_available", lambda name: False)
    with pytest.raises(ImportError, match="pip install timm"):
        create_empty_model("a/b", None)


def test_timm_gets_the_name_with_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(create_model=lambda name, pretrained: (name, pretrained))
    answer(monkeypatch, SimpleNamespace(library_name="timm"))
    monkeypatch.setattr(estimate_parser.probes, "is_available", lambda name: True)
    monkeypatch.setitem(estimate_parser.importlib.sys.modules, "timm", made)
    assert create_empty_model("timm/net", None) == ("hf-hub:timm/net", False)


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


def test_what_the_hub_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def raise_(error: Exception) -> Any:
        def ask(repo: str, token: str | None = None) -> Any:
            raise error

        return ask

    rows = (
        (GatedRepoError("a", response=RESPONSE), "gated"),
        (RepositoryNotFoundError("a", response=RESPONSE), "repo"),
        (ConnectionError("offline"), "gated"),
    )
    for error, found in rows:
        monkeypatch.setattr(huggingface_hub, "model_info", raise_(error))
        assert verify_on_hub("a/b") == found
    monkeypatch.setattr(huggingface_hub, "model_info", lambda repo, token: (repo, token))
    assert verify_on_hub("a/b", "t") == ("a/b", "t")


@pytest.mark.parametrize("has_timm", [True, False])
def test_the_library_of_an_error_is_accelerates(monkeypatch: pytest.MonkeyPatch, has_timm: bool) -> None:
    is_there = {"timm": has_timm, "transformers": True}
    monkeypatch.setattr(estimate_parser.probes, "is_available", is_there.__getitem__)
    monkeypatch.setattr(reference, "is_timm_available", lambda: has_timm)
    monkeypatch.setattr(reference, "is_transformers_available", lambda: True)
    for error in (
        RuntimeError("Unknown model (net)"),
        RuntimeError("other"),
        KeyError("architecture"),
        EntryNotFoundError("a"),
        OSError("a does not appear to have a file named config.json"),
        ValueError("Unrecognized model in a"),
        TypeError("Unrecognized model in a"),
        OSError("other"),
    ):
        assert check_has_model(error) == reference.check_has_model(error), error


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "fp8", "int8", "int4"])
def test_the_memory_of_a_training_is_accelerates(precision: str) -> None:
    for rest in ((), ("O1",)):
        ours = estimate_training_usage(1001, precision, *rest)
        assert ours == reference.estimate_training_usage(1001, precision, *rest)


@pytest.mark.parametrize(
    "name", ["resnet50", "resnet50.a1", "timm/resnet50", "hf-hub:timm/a", "local-dir:/a"]
)
def test_names_of_timm_are_accelerates(name: str) -> None:
    assert add_timm_hub_prefix(name) == reference.add_timm_hub_prefix(name)


def test_another_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "gated")
    with pytest.raises(OSError, match="a/b"):
        estimate_command(argparse.Namespace(model_name="a/b", library_name=None, trust_remote_code=False))
