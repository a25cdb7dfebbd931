"""Files and words that are made to take all memory, to run code, or to have no end."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_accel.cli import notebook
from notebook_accel.config import file
from notebook_accel.errors import ConfigError


def laugh(levels: int = 40, width: int = 10) -> str:
    """Return a YAML whose last list has `width ** levels` items, all by the same few objects."""
    lines = ["l0: &l0 [ha, ha]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merge(levels: int = 30) -> str:
    lines = ["m0: &m0 {num_processes: 2}"]
    lines += [f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, levels)]
    return "\n".join(lines)


YAML = {
    "billion laughs": laugh(),
    "laughs of a known option": f"{laugh()}\nmixed_precision: *l39",
    "merged again and again": merge(),
    "python object": "num_processes: !!python/object/apply:os.system ['touch was-run']",
    "python name": "num_processes: !!python/name:os.system",
    "python module": "mixed_precision: !!python/module:this",
    "unknown tag": "num_processes: !run [touch, was-run]",
    "list in itself": "num_processes: &own [*own]",
    "deep lists": f"num_processes: {'[' * 100_000}",
    "deep lists that end": f"num_processes: {'[' * 500}{']' * 500}",
    "deep maps": "".join(f"{' ' * n}a:\n" for n in range(1_000)),
    "deep keys": f"{'? ' * 50_000}a",
    "twice": "num_processes: 2\nnum_processes: 3",
    "huge number": f"num_processes: {'9' * 500_000}",
    "huge base": f"num_processes: 0x{'f' * 500_000}",
    "huge exponent": "num_processes: 1e999999999",
    "base 60": f"num_processes: 1{':59' * 100_000}",
    "not a number": "num_processes: .nan",
    "date": "num_processes: 2026-99-99",
    "set": "num_processes: !!set {a, b}",
    "bytes": "num_processes: !!binary AAAA",
    "zero": "num_processes: \x00",
    "two documents": "num_processes: 2\n---\nnum_processes: 3",
    "directive": "%YAML 9.9\n---\nnum_processes: 2.5",
    "keys of any kind": "? [a, b]\n: 1\n? {a: b}\n: 2\n1: 2\nnull: 3",
    "long name": f"{'n' * 500_000}: 1",
    "anchors without end": "num_processes: " + " ".join(f"&a{n}" for n in range(1_000)),
}
JSON = {
    "deep": '{"num_processes": ' + "[" * 100_000,
    "deep that ends": '{"num_processes": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "huge number": '{"num_processes": ' + "9" * 500_000 + "}",
    "infinite": '{"num_processes": Infinity}',
    "twice": '{"num_processes": 2, "num_processes": 3}',
    "surrogates": '{"mixed_precision": "\\ud800"}',
}


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refuse(call: Callable[[], Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    assert not Path("was-run").exists()
    assert len(str(caught.value)) < 3_000, "a sentence, and not the file"
    str(caught.value).encode("utf-8", "surrogatepass")
    return caught.value


@pytest.mark.parametrize("name", YAML)
def test_configs_in_yaml(name: str) -> None:
    Path("c.yaml").write_text(YAML[name])
    refuse(lambda: file.read("c.yaml"))


@pytest.mark.parametrize("name", JSON)
def test_configs_in_json(name: str) -> None:
    Path("c.json").write_text(JSON[name])
    refuse(lambda: file.read("c.json"))


@pytest.mark.parametrize("name", YAML)
def test_values_of_parameters(name: str) -> None:
    """A parameter of a notebook is a scalar of YAML, or else the text itself."""
    text = YAML[name].partition("num_processes: ")[2] or YAML[name]
    value = notebook.parse_scalar(text)
    assert value is None or isinstance(value, (bool, int, float, str))
    assert not Path("was-run").exists()


NOTEBOOKS = {
    "deep": "[" * 100_000,
    "deep metadata": '{"cells": [], "metadata": '
    + '{"a": ' * 50_000
    + "1"
    + "}" * 50_000
    + ', "nbformat": 4}',
    "huge version": '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": ' + "9" * 5_000 + "}",
    "version of a text": '{"cells": [], "metadata": {}, "nbformat": "4", "nbformat_minor": "x"}',
    "cells of nothing": '{"cells": [null, 5, "x"], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "source of numbers": json.dumps(
        {"cells": [{"cell_type": "code", "source": 5}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    ),
    "nothing": "",
    "null": "null",
    "binary": "\x00\x01\x02",
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks(name: str) -> None:
    Path("x.ipynb").write_text(NOTEBOOKS[name])
    refuse(lambda: notebook._read(Path("x.ipynb")))


def test_a_deep_file_is_read_in_a_thread_with_a_small_stack() -> None:
    """As the kernel of a front end may do it: there a recursion without end ends the process."""
    Path("c.yaml").write_text(YAML["deep lists that end"])
    caught: list[BaseException] = []

    def read() -> None:
        try:
            file.read("c.yaml")
        except BaseException as error:
            caught.append(error)

    before = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert [type(error) for error in caught] == [ConfigError], sys.getrecursionlimit()
