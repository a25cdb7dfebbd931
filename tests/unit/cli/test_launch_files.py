"""Tests for `notebook-accel launch` with config files as people have them, whole and broken ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from notebook_accel.config import file
from tests.structure.source import ROOT
from tests.unit import launching
from tests.unit.launching import dry, refused, rows, run

alone = launching.alone
SAMPLES = ROOT / "tests" / "unit" / "configs"
NO_GPU = "distributed_type {}: this machine has no {}: launch where there is one, or add --cpu to use CPUs"

LACKING = {
    "fsdp_transformers_guide": [NO_GPU.format("FSDP", "GPU")],
    "multi_gpu_cluster_guide": [NO_GPU.format("MULTI_GPU", "CUDA GPU")],
    "template_deepspeed": [
        "distributed_type DEEPSPEED: deepspeed is not installed here",
        "deepspeed_config_file deepspeed_zero2.json does not exist, did you mean {samples}/deepspeed_zero2.json?",
        NO_GPU.format("DEEPSPEED", "GPU"),
    ],
    "template_fp8": ["fp8_config.backend TE: transformer_engine is not installed here"],
    "template_multi_gpu": [NO_GPU.format("MULTI_GPU", "CUDA GPU")],
    "template_multi_node": [NO_GPU.format("MULTI_GPU", "CUDA GPU")],
    "template_multi_xpu": [NO_GPU.format("MULTI_XPU", "Intel GPU")],
    "template_single_accelerator": [],
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the libraries that the samples name."""
    monkeypatch.setattr("notebook_accel.probes.is_available", lambda name: False)


def test_every_sample_is_tried() -> None:
    assert sorted(path.stem for path in SAMPLES.glob("*.yaml")) == sorted(LACKING)


@pytest.mark.parametrize("name", LACKING)
def test_a_sample_resolves_anywhere_and_says_what_is_lacking(name: str) -> None:
    result = dry("--config_file", str(SAMPLES / f"{name}.yaml"))
    assert result.exit_code == 0, result.output
    told = [line for line in result.output.splitlines() if line.startswith("Warning: ")]
    assert told == [f"Warning: {text.format(samples=SAMPLES)}" for text in LACKING[name]]
    config = file.read(SAMPLES / f"{name}.yaml").config
    found = rows(result.output)
    assert found["mixed_precision"][0] == config.mixed_precision
    if config.num_processes is not None:
        assert found["num_processes"] == (str(config.num_processes), str(SAMPLES / f"{name}.yaml"))


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3_offload"])
def test_deepspeeds_own_file_is_found_where_the_config_names_it(name: str, tmp_path: Path) -> None:
    text = (SAMPLES / "template_deepspeed.yaml").read_text().replace("deepspeed_zero2", name)
    Path("c.yaml").write_text(text)
    shutil.copy(SAMPLES / f"{name}.json", tmp_path)
    result = dry("--config_file", "c.yaml")
    assert "does not exist" not in result.output
    assert rows(result.output)["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == (f"{name}.json", "c.yaml")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    shutil.copy("../train.py", ".")
    result = dry("--config_file", "../c.yaml")
    assert f"deepspeed_config_file {name}.json does not exist, did you mean ../{name}.json?" in result.output


def test_deepspeeds_file_is_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "--config_file", str(SAMPLES / "deepspeed_zero2.json"), "train.py")
    assert told[0] == f"{SAMPLES / 'deepspeed_zero2.json'}:2: fp16 is no option"


TELLING = """
import json
from notebook_accel import Accelerator
accelerator = Accelerator()
if accelerator.is_main_process:
    print(json.dumps([accelerator.num_processes, accelerator.mixed_precision, accelerator.device.type]))
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("name", "processes"),
    [("template_multi_gpu", 2), ("template_multi_xpu", 2), ("template_single_accelerator", 1)],
)
def test_what_cpus_can_serve_runs_on_them(name: str, processes: int) -> None:
    Path("tell.py").write_text(TELLING)
    out, _ = run("--config_file", str(SAMPLES / f"{name}.yaml"), "--cpu", "tell.py")
    assert json.loads(out) == [processes, "bf16", "cpu"]


RANKS = """
import os
text = os.environ["RANK"] + " " + os.environ["ACCELERATE_MIXED_PRECISION"]
os.write(1, text.encode() + bytes([10]))  # a whole line at once
"""


def test_a_config_for_eight_gpus_runs_on_cpus() -> None:
    Path("tell.py").write_text(RANKS)
    out, _ = run("--config_file", str(SAMPLES / "multi_gpu_cluster_guide.yaml"), "--cpu", "tell.py")
    assert sorted(out.splitlines()) == [f"{rank} bf16" for rank in range(8)]


BROKEN: dict[str, tuple[bytes | None, str]] = {
    "cut.yaml": (b"num_processes: 2\nmixed_precision: 'bf", "cut.yaml:2: "),
    "cut-list.yaml": (b"num_processes: 2\ntpu_env: [a, b\n", "cut-list.yaml:"),
    "tab.yaml": (
        b"fsdp_config:\n\tfsdp_version: 1\n",
        "tab.yaml:2: a tab: YAML is indented with spaces",
    ),
    "int.yaml": (
        b"use_cpu: true\nnum_processes: two\n",
        "int.yaml:2: num_processes 'two' is no whole number",
    ),
    "bool.yaml": (b"\nuse_cpu: 7\n", "bool.yaml:2: use_cpu 7 is neither true nor false"),
    "section.yaml": (b"fsdp_config: [1]\n", "section.yaml:1: fsdp_config is a section of options, not [1]"),
    "list.yaml": (
        b"mixed_precision: [bf16]\n",
        "list.yaml:1: mixed_precision ['bf16'] is none of no, fp16, bf16, fp8",
    ),
    "nested.yaml": (
        b"fsdp_config:\n  fsdp_version: 1\n  fsdp_min_num_params: many\n",
        "nested.yaml:3: fsdp_min_num_params 'many' is no whole number",
    ),
    "unknown.yaml": (
        b"use_cpu: true\nnum_proceses: 2\n",
        "unknown.yaml:2: num_proceses is no option, did you mean num_processes?",
    ),
    "misplaced.yaml": (
        b"use_cpu: true\nzero_stage: 2\n",
        "misplaced.yaml:2: zero_stage is no option, did you mean deepspeed_config.zero_stage?",
    ),
    "twice.yaml": (b"num_processes: 2\nnum_processes: 3\n", "twice.yaml:2: num_processes stands there twice"),
    "twice.json": (
        b'{\n"num_processes": 2,\n"num_processes": 3}\n',
        "twice.json:3: num_processes stands there twice",
    ),
    "misfit.yaml": (
        b"num_machines: 2\nnum_processes: 3\n",
        "misfit.yaml:2: num_processes 3 is no multiple of num_machines 2",
    ),
    "large.yaml": (b"a: b\n" * 2_100_000, "large.yaml has 10500000 bytes: no config file is so large"),
    "binary.yaml": (bytes(range(256)), "binary.yaml is no text: byte 128 is no UTF-8"),
    "control.yaml": (b"num_processes: 2\n\x00\x01\n", "control.yaml:2: "),
    "folder.yaml": (None, "folder.yaml cannot be read: Is a directory"),
    "missing.yaml": (None, "missing.yaml cannot be read: No such file or directory"),
    "cut.json": (b'{"num_processes": 2,', "cut.json:1: "),
    "text.yaml": (b"num_processes", "text.yaml holds no options: expected lines such as 'num_processes: 2'"),
    "alias.yaml": (b"a: *b\n", "alias.yaml:1: "),
    "empty.yaml": (b"", "empty.yaml is empty: expected lines such as 'num_processes: 2'"),
    "blank.yaml": (b"\n \n", "blank.yaml is empty"),
    "empty.json": (b"", "empty.json:1: "),
    "merged.yaml": (
        b"fsdp_config: &all\n  fsdp_version: 2\ndeepspeed_config:\n  <<: *all\n",
        "merged.yaml:3: deepspeed_config.fsdp_version is no option, did you mean fsdp_config.fsdp_version?",
    ),
    "truth.yaml": (b"num_processes: true\n", "truth.yaml:1: num_processes True is no whole number"),
    "number.yaml": (b"2: 3\n", "number.yaml: 2 is no option"),
    "pipe.yaml": (None, "pipe.yaml is no file but a pipe or a device"),
    "variable.yaml": (
        b"environment:\n  A=B: c\n",
        "variable.yaml:1: environment {'A=B': 'c'} has 'A=B', which is no name of a variable",
    ),
    "nothing.yaml": (
        b"environment:\n  A:\n",
        "nothing.yaml:1: environment {'A': None} has None for A, which is no text",
    ),
    "sagemaker.yaml": (
        b"compute_environment: AMAZON_SAGEMAKER\nregion: us-east-1\ndistributed_type: DATA_PARALLEL\n",
        "sagemaker.yaml:1: compute_environment AMAZON_SAGEMAKER: runs are launched on this machine only",
    ),
    "c.toml": (b"num_processes = 2\n", "c.toml does not end in .yaml, .yml, .json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence_and_nothing_is_touched(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, sentence = BROKEN[name]
    if content is not None:
        Path(name).write_bytes(content)
    elif name.startswith("folder"):
        Path(name).mkdir()
    elif name.startswith("pipe"):
        os.mkfifo(name)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    (told,) = refused(capsys, "--cpu", "--config_file", name, "train.py")
    assert told.startswith(sentence)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("content", [b"# nothing\n", b"{}"])
def test_a_file_without_options_says_nothing(content: bytes) -> None:
    Path("c.yaml").write_bytes(content)
    assert rows(dry("--config_file", "c.yaml").output)["mixed_precision"] == ("no", "default")
