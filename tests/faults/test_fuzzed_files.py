"""Any bytes in a file that the package reads: a value comes out, or the error that the reader documents."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from notebook_accel.big_modeling import offload
from notebook_accel.checkpointing import checksums, manifest, names, pickled, shards, weights
from notebook_accel.cli import notebook
from notebook_accel.config import document
from notebook_accel.config.schema import LaunchConfig, section_names
from notebook_accel.deepspeed import config as deepspeed_config
from notebook_accel.errors import CheckpointError, ConfigError
from notebook_accel.estimation import sources
from tests.faults.fuzzing import JSON, TEXTS, change_bytes, change_parts, fuzz, make_documents, write_json

_BOUND = 1 << 29  # bytes of memory for files of some kilobytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@pytest.fixture(scope="module", autouse=True)
def _bounded() -> Iterator[None]:
    before = _find_peak()
    yield
    assert _find_peak() - before < _BOUND, "a file made this process grow"


def _find_peak() -> int:
    """Return the most memory that this process has had; 0 where the system does not say it."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- checkpoints


def _manifest() -> dict[str, Any]:
    return {
        "version": 1,
        "step": 3,
        "world_size": 2,
        "data_shares": 2,
        "files": {"optimizer.bin": 5, "model.safetensors": 0},
        "checksums": {"optimizer.bin": "00000000"},
    }


def sign(content: Any) -> bytes:
    """Return a manifest with its own checksum, as one who changes it on purpose would."""
    if isinstance(content, dict):
        content = {**content, "checksum": "0" * 8}
    text = json.dumps(content)
    own = checksums.show(zlib.crc32(text.encode()))
    return text.replace('"checksum": "00000000"', f'"checksum": "{own}"').encode()


@fuzz(500)
@given(make_documents(_manifest()) | change_parts(_manifest()).map(sign))
@example(b'{"version": 1e999, "files": {}}')
@example(b"[" * 100_000)
@example(sign({**_manifest(), "checksums": {"optimizer.bin": 7}}))
@example(sign({**_manifest(), "files": {"optimizer.bin\0": 7}}))
@example(sign({**_manifest(), "files": {"x" * 5_000: 7}}))
def test_a_manifest(folder: Path, data: bytes) -> None:
    (folder / names.MANIFEST).write_bytes(data)
    (folder / "optimizer.bin").write_bytes(b"12345")
    try:
        listed = manifest.read(folder)
        listed.check_files()
        listed.verify(folder / "optimizer.bin")
    except CheckpointError:
        return
    assert all(isinstance(size, int) for size in listed.sizes.values())


def make_weights() -> bytes:
    head = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        "b": {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]},
    }
    return add_values(head, 16)


def add_values(head: Any, count: int) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + bytes(count)


HEAD = json.loads(make_weights()[8:-16])


@fuzz(500)
@given(
    st.one_of(
        change_parts(HEAD).map(lambda head: add_values(head, 16)),
        change_bytes(make_weights()),
        st.binary(max_size=60),
    )
)
@example(add_values({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, 16))
@example(add_values({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, 16))
@example(add_values({"a": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 16]}}, 16))
@example(add_values({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]}}, 16))
@example(add_values({"a": {"dtype": "F32", "shape": [4], "data_offsets": [False, 16]}}, 16))
@example(add_values({"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}, 16))
@example(add_values({"a": {"dtype": [], "shape": [4], "data_offsets": [0, 16]}}, 16))
def test_weights(folder: Path, data: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    try:
        header = weights.read_header(path)
        found = weights.read(path, header)
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= len(data)


def test_weights_of_which_many_lie_at_the_same_place(folder: Path) -> None:
    head = {
        f"a{number}": {"dtype": "U8", "shape": [100_000], "data_offsets": [0, 100_000]}
        for number in range(1_000)
    }
    path = folder / "model.safetensors"
    path.write_bytes(add_values(head, 100_000))
    with pytest.raises(CheckpointError, match="overlap"):
        weights.read_header(path)


def save(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


SAVED = save({"a": torch.arange(4.0), "b": {"c": [1, "x"], "d": torch.zeros(2, dtype=torch.int8)}})


@fuzz(300)
@given(change_bytes(SAVED) | st.binary(max_size=60))
def test_files_of_torch_save(folder: Path, data: bytes) -> None:
    path = folder / "optimizer.bin"
    path.write_bytes(data)
    for read in (pickled.read, lambda path: pickled.Outline(path).fill(lambda where, tensor: None)):
        with contextlib.suppress(CheckpointError, OSError):
            read(path)


def rezip(
    whole: bytes,
    change: Callable[[str, bytes], bytes] = lambda name, data: data,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """Return a file of torch.save with other contents or compression of its entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return file.getvalue()


def test_a_file_that_grows_as_it_is_read(folder: Path) -> None:
    bomb = rezip(save({"a": torch.zeros(5_000_000)}), compression=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    path = folder / "optimizer.bin"
    path.write_bytes(bomb)
    for read in (pickled.read, pickled.Outline):
        with pytest.raises(CheckpointError, match="compressed"):
            read(path)


def test_a_pickle_in_a_file_is_not_run(folder: Path, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "made by a stranger",)

    path = folder / "optimizer.bin"
    hostile = pickle.dumps(Touch())
    for data in (hostile, rezip(SAVED, lambda name, data: hostile if name.endswith("data.pkl") else data)):
        path.write_bytes(data)
        for read in (pickled.read, pickled.Outline):
            with pytest.raises(CheckpointError):
                read(path)
    assert not any(tmp_path.iterdir())


INDEX = {"metadata": {"total_size": 16}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}


@fuzz()
@given(make_documents(INDEX))
@example(write_json({"weight_map": {"a": "x\0"}}))
@example(write_json({"weight_map": {"a": "x" * 5_000}}))
@example(write_json({"weight_map": {"a": "../" * 3_000}}))
def test_an_index_of_weights(folder: Path, data: bytes) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(data)
    (folder / "model.safetensors").write_bytes(make_weights())
    with contextlib.suppress(CheckpointError):
        assert all(file.is_file() for file in shards.find_files(path))


@fuzz()
@given(make_documents({"a": {"dtype": "float32", "shape": [2]}}))
def test_an_index_of_offloaded_weights(folder: Path, data: bytes) -> None:
    (folder / offload.INDEX).write_bytes(data)
    with contextlib.suppress(CheckpointError):
        offload.read_index(folder)


@fuzz()
@given(make_documents({"architectures": ["x"]}))
def test_a_config_of_a_model(folder: Path, data: bytes) -> None:
    path = folder / "config.json"
    path.write_bytes(data)
    with contextlib.suppress(ValueError, ImportError):
        sources._of_config(path, False)


# -- configs and notebooks

CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_processes": 2,
    "num_machines": 1,
    "mixed_precision": "bf16",
    "fsdp_config": {"fsdp_version": 2, "fsdp_min_num_params": 100},
    "gpu_ids": "0,1",
    "rdzv_conf": "join_timeout=3",
    "environment": {"A": "b"},
}
CONFIG_LINES = [
    "num_processes: 2",
    "num_processes: 0x" + "f" * 5_000,
    "num_processes: .inf",
    "num_processes: .nan",
    "num_processes: 1e999",
    "num_processes: '" + "9" * 5_000 + "'",
    "num_machines: 1:4",
    "num_machines: '1:" + "9" * 5_000 + "'",
    "main_process_port: -1",
    "machine_rank: 2001-13-45",
    "mixed_precision: !!timestamp x",
    "mixed_precision: !!int ''",
    "mixed_precision: !!float x",
    'mixed_precision: !!binary "?"',
    "mixed_precision: !!set {a, b}",
    "mixed_precision: !!omap [a: 1]",
    "mixed_precision: !!python/object:os.system x",
    "mixed_precision: !x y",
    "mixed_precision: &a [*a]",
    "fsdp_config: &b {fsdp_version: *b}",
    "fsdp_config: 7",
    "fsdp_config: {1: 2, [3]: 4}",
    "? [a, b]\n: c",
    "? {a: b}\n: c",
    "<<: 7",
    "<<: *x",
    "<<: {a: b}",
    "1: 2",
    "~: 2",
    ".nan: 2",
    "2001-01-01: 2",
    "a: |\n  b",
    "%YAML 1.1",
    "%TAG ! tag:x",
    "---",
    "...",
    "{",
    "]",
    "\t",
    "a: 'b",
    "use_cpu: 12:30:45",
    "use_cpu: 0o9",
    "use_cpu: 0b2",
    "use_cpu: _",
    "use_cpu: +",
]


@fuzz(150)
@given(
    st.one_of(
        st.lists(st.sampled_from(CONFIG_LINES) | TEXTS, max_size=5).map(
            lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
        ),
        change_bytes(LaunchConfig.model_validate(CONFIG).model_dump_json().encode()),
        make_documents(CONFIG),
    ),
    st.sampled_from(["yaml", "json"]),
)
@example(b"num_processes: 0x" + b"f" * 5_000, "yaml")
@example(b'{"main_process_port": ' + b"9" * 4_000 + b"}", "json")
def test_a_config(folder: Path, data: bytes, ending: str) -> None:
    path = folder / f"config.{ending}"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = LaunchConfig.read(path)
        except ConfigError as error:
            assert len(str(error)) < 1_000_000
            return
        again = config.write(folder / "again.yaml", replace=True)
        assert LaunchConfig.read(again) == config


@pytest.mark.parametrize(
    "name", ["x" * 300 + ".yaml", "a\0.yaml", "~nobody\0/a.yaml", "\ud800.yaml", "a/" * 3_000 + ".yaml"]
)
def test_a_config_whose_name_is_none(tmp_path: Path, name: str) -> None:
    for path in (name, tmp_path / name):
        with pytest.raises(ConfigError):
            document.read(path, section_names())
        with pytest.raises((ConfigError, OSError)):
            document.write({}, path, replace=True)


def test_aliases_of_aliases_take_no_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 9)]
    for last in ("num_processes: *a8", "fsdp_config: *a8", "environment: {A: *a8}", "fsdp_config: {a: *a8}"):
        path = tmp_path / "config.yaml"
        path.write_text("\n".join([*lines, last]))
        with pytest.raises(ConfigError) as caught:
            LaunchConfig.read(path)
        assert len(str(caught.value)) < 100_000


@fuzz()
@given(
    make_documents({"zero_optimization": {"stage": 2}}).map(lambda data: data.decode("utf-8", "replace"))
    | TEXTS
)
def test_a_config_of_deepspeed(text: str) -> None:
    try:
        found = deepspeed_config._read(text)
    except ValueError:
        return
    assert isinstance(found, dict)


BOOK = {
    "cells": [
        {
            "cell_type": "code",
            "id": "a",
            "execution_count": 1,
            "metadata": {"tags": ["parameters"]},
            "outputs": [{"output_type": "stream", "name": "stdout", "text": "x"}],
            "source": "steps = 3",
        },
        {"cell_type": "markdown", "id": "b", "metadata": {}, "source": ["# a"]},
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "x"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@fuzz(100)
@given(make_documents(BOOK), JSON)
def test_a_notebook(folder: Path, data: bytes, value: Any) -> None:
    path = folder / "book.ipynb"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            book = notebook._read(path)
        except ConfigError:
            return
        notebook.inject(book, {"steps": value})
        notebook._clear_outputs(book)


@fuzz()
@given(
    st.lists(
        TEXTS | st.sampled_from(["1", ": ", "- ", "[", "&a", "*a", "!!int ", "0x1", "\n", "'"]), max_size=5
    )
)
def test_a_parameter(texts: list[str]) -> None:
    value = notebook.parse_scalar("".join(texts))
    assert value is None or isinstance(value, (bool, int, float, str))


def test_the_examples_are_not_all_refused(folder: Path) -> None:
    assert weights.read_header(_write(folder / "m.safetensors", make_weights())).entries.keys() == {"a", "b"}
    assert pickled.read(_write(folder / "o.bin", SAVED))["a"].tolist() == [0, 1, 2, 3]
    (folder / "optimizer.bin").write_bytes(b"12345")
    _write(folder / names.MANIFEST, sign(_manifest()))
    assert manifest.read(folder).sizes["optimizer.bin"] == 5
    assert LaunchConfig.model_validate(CONFIG).num_processes == 2
    assert len(notebook._read(_write(folder / "book.ipynb", write_json(BOOK))).cells) == 2


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
