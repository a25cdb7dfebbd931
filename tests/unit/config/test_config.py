"""Tests for the schema of launch options, its files, and what it tells processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from notebook_accel import ConfigError, devices, environ, notebook_launcher
from notebook_accel.config import basic, export, file
from notebook_accel.config.schema import LaunchConfig, chosen_names, flat_values, has_effect, table
from tests.unit.config_values import configs


@settings(max_examples=60, deadline=None)
@given(config=configs(), as_json=st.booleans())
@example(config=LaunchConfig(monitor_interval=6.013100052385504e-293), as_json=False)
def test_a_file_gives_the_config_back(
    tmp_path_factory: pytest.TempPathFactory, config: LaunchConfig, as_json: bool
) -> None:
    path = tmp_path_factory.mktemp("config") / ("c.json" if as_json else "c.yaml")
    config.write(path)
    first = path.read_text()
    assert file.read(path).config == config
    config.write(path)
    assert path.read_text() == first


WRONG = [
    ({"mixed_precision": "fp17"}, "mixed_precision 'fp17' is none of no, fp16, bf16, fp8"),
    ({"num_processes": "two"}, "num_processes 'two' is no whole number"),
    ({"num_processes": 0}, "num_processes 0 is less than 1"),
    ({"main_process_port": 70000}, "main_process_port 70000 is more than 65535"),
    ({"num_proceses": 2}, "num_proceses is no option, did you mean num_processes?"),
    ({"quite_unlike": 2}, "quite_unlike is no option"),
    ({"use_cpu": "maybe"}, "use_cpu 'maybe' is neither true nor false"),
    ({"gpu_ids": "a,b"}, "gpu_ids 'a,b' does not look like 0,1"),
    ({"dynamo_config": 3}, "dynamo_config is a section of options, not 3"),
    ({"fsdp_config": {"fsdp_version": 3}}, "fsdp_version 3 is none of 1, 2"),
    ({"fsdp_config": {"fsdp_verson": 1}}, "fsdp_config.fsdp_verson is no option, did you mean fsdp_version?"),
    ({"deepspeed_config": {"gradient_clipping": "x"}}, "gradient_clipping 'x' is no number"),
    (
        {"deepspeed_config": {"gradient_accumulation_steps": 0}},
        "gradient_accumulation_steps 0 is less than 1",
    ),
    ({"num_processes": 3, "num_machines": 2}, "num_processes 3 is no multiple of num_machines 2"),
    ({"machine_rank": 2}, "machine_rank 2 >= num_machines 1"),
]


@pytest.mark.parametrize(("values", "sentence"), WRONG, ids=lambda value: str(value)[:30])
def test_wrong_values_have_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LaunchConfig.model_validate(values)
    assert str(caught.value).startswith(sentence)
    assert len(caught.value.problems) == 1


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "# two lines\n\nnum_processes: two\nmixd_precision: bf16\nfsdp_config:\n  fsdp_version: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        file.read(path)
    assert str(caught.value).splitlines() == [
        f"{path}:4: mixd_precision is no option, did you mean mixed_precision?",
        f"{path}:3: num_processes 'two' is no whole number",
        f"{path}:6: fsdp_version 3 is none of 1, 2",
    ]


BROKEN = {
    "tab.yaml": (b"fsdp_config:\n\tfsdp_version: 1\n", r"tab.yaml:2: "),
    "cut.yaml": (b"num_processes: 2\ntpu_env: [a, b\n", r"cut.yaml:\d: "),
    "twice.yaml": (b"num_processes: 2\nnum_processes: 3\n", r"twice.yaml:2: "),
    "list.yaml": (b"- a\n- b\n", "holds no options"),
    "text.yaml": (b"hello", "holds no options"),
    "binary.yaml": (bytes(range(256)), "is no text"),
    "large.yaml": (b"a: b\n" * 2_000_000, "no config file is so large"),
    "cut.json": (b'{"num_processes": 2,', r"cut.json:1: "),
    "wrong.json": (b'{\n\t"num_processes": "x"\n}', r"wrong.json:2: num_processes 'x' is no whole number"),
    "c.toml": (b"", "does not end in"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    content, pattern = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=pattern):
        file.read(tmp_path / name)
    with pytest.raises(ConfigError):
        LaunchConfig().write(tmp_path / name) if name != "wrong.json" else file.read(tmp_path / name)
    assert (tmp_path / name).read_bytes() == content and os.listdir(tmp_path) == [name]


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml cannot be read: No such file"):
        file.read(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        file.read(tmp_path)


OLD = """\
# written long ago
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config:
  fsdp_backward_prefetch_policy: BACKWARD_POST  # the old name
  fsdp_sharding_strategy: 2
  fsdp_transformer_layer_cls_to_wrap: [BertLayer, Other]
main_process_ip: null
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
ipex_config: {}
use_mps_device: true
"""


def test_old_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(OLD)
    with pytest.warns(UserWarning, match="use_mps_device means nothing any more"):
        config = file.read(path).config
    assert config.fsdp_config.fsdp_backward_prefetch == "BACKWARD_POST"
    assert config.fsdp_config.fsdp_sharding_strategy == "SHARD_GRAD_OP"
    assert config.fsdp_config.fsdp_transformer_layer_cls_to_wrap == "BertLayer,Other"
    assert (config.num_processes, config.mixed_precision, config.downcast_bf16) == (2, "bf16", False)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("fp16: true\n", "mixed_precision", "fp16"),
        ("fp16: true\nmixed_precision: bf16\n", "mixed_precision", "bf16"),
        ("fp16: false\n", "mixed_precision", "no"),
        ("distributed_type: MPS\n", "distributed_type", "NO"),
        ("mixed_precision: !!str no\n", "mixed_precision", "no"),
        ("environment:\n  A: 1\n  B: true\n", "environment", {"A": "1", "B": "true"}),
    ],
)
def test_words_that_files_have_too(tmp_path: Path, text: str, name: str, value: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert getattr(file.read(path).config, name) == value


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, path = tmp_path / "link.yaml", tmp_path / "there" / "c.yaml"
    link.symlink_to(path)
    assert LaunchConfig(num_processes=2).write(link) == link
    path.write_text(f"# mine\n{path.read_text()}")
    LaunchConfig(num_processes=3).write(link)
    assert link.is_symlink() and path.read_text().startswith("# mine\n")
    assert file.read(path).config.num_processes == 3


@pytest.mark.parametrize("content", [b"num_processes: [\n", b"\xff"])
def test_a_broken_file_is_replaced_only_when_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        LaunchConfig(num_processes=2).write(path)
    assert path.read_bytes() == content
    assert basic.write_basic_config(save_location=path, overwrite=True) == path
    assert file.read(path).config == basic.detect(mixed_precision="no")


def test_the_folder_of_a_user_who_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "~nobody-of-this-name/x")
    assert file.default_path() == Path("~nobody-of-this-name/x/accelerate/default_config.yaml")
    for name in ("~nobody-of-this-name/c.yaml", "a\0b.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            file.read(name)


def test_an_update_keeps_comments(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# mine\nnum_processes: 2  # two GPUs\nmixed_precision: bf16\n")
    config = file.read(path).config
    config.model_copy(update={"num_processes": 4}).write(path)
    text = path.read_text()
    assert text.startswith("# mine\nnum_processes: 4  # two GPUs\nmixed_precision: bf16\n")
    assert file.read(path).config.num_processes == 4


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    LaunchConfig(num_processes=2).write(path)
    before = path.read_text()

    def fail(source: Any, target: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        LaunchConfig(num_processes=3).write(path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["c.yaml"]


def test_accelerate_reads_what_is_written(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    options: list[dict[str, Any]] = [
        {},
        {"num_processes": 2, "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
        {"distributed_type": "FSDP", "num_processes": 2},
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        {"mixed_precision": "fp8", "num_machines": 2, "num_processes": 4, "machine_rank": 1},
        {"dynamo_config": {"dynamo_backend": "inductor"}},
    ]
    for number, values in enumerate(options):
        path = LaunchConfig.model_validate(values).write(tmp_path / f"{number}.yaml")
        theirs = config_args.load_config_from_file(str(path))
        for name in ("num_processes", "mixed_precision", "num_machines", "machine_rank"):
            if name in values:
                assert getattr(theirs, name) == values[name]


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert file.default_path() == tmp_path / ".cache/huggingface/accelerate/default_config.yaml"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert file.default_path() == tmp_path / "x/huggingface/accelerate/default_config.yaml"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "h"))
    assert file.default_path() == tmp_path / "h/accelerate/default_config.yaml"


def test_processes_are_told_what_matters() -> None:
    fsdp = {"fsdp_transformer_layer_cls_to_wrap": "BertLayer", "fsdp_offload_params": True}
    config = LaunchConfig.model_validate(
        {"distributed_type": "FSDP", "fsdp_config": fsdp, "mixed_precision": "bf16", "gpu_ids": "0, 1"}
    )
    texts = export.environment(config)
    assert texts["ACCELERATE_USE_FSDP"] == "true" and texts["FSDP_OFFLOAD_PARAMS"] == "true"
    assert texts["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "BertLayer" and texts["FSDP_VERSION"] == "1"
    assert texts["CUDA_VISIBLE_DEVICES"] == "0,1" and texts["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not any(name.startswith(("ACCELERATE_DEEPSPEED", "ACCELERATE_FP8", "MEGATRON")) for name in texts)
    assert "FSDP_MIN_NUM_PARAMS" not in texts, "it is for another policy"
    assert not any(name.startswith("FSDP") for name in export.environment(LaunchConfig()))


def test_what_hangs_on_an_option_without_a_meaning_has_none_itself() -> None:
    """A path for weights on NVMe is for weights that are offloaded, which only ZeRO 3 does."""
    by_name = {option.name: option for option in table()}
    deepspeed: dict[str, Any] = {"offload_param_device": "nvme", "offload_param_nvme_path": "/fast"}
    for stage in (2, 3):
        config = LaunchConfig.model_validate(
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage, **deepspeed}}
        )
        path = by_name["deepspeed_config.offload_param_nvme_path"]
        assert has_effect(path, flat_values(config)) == (stage == 3)
        assert (str(path.face.env) in export.environment(config)) == (stage == 3)


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_variables_are_as_accelerate_reads_them(config: LaunchConfig) -> None:
    values = flat_values(config)
    texts = export.environment(config)
    for option in table():
        value = values[option.name]
        told = option.face.env in texts and option.face.env not in config.environment
        if told and isinstance(value, bool) and has_effect(option, values):
            assert environ.parse_bool(texts[str(option.face.env)]) in (True, False)
    assert all(isinstance(text, str) for text in texts.values())


def tell() -> Any:
    from notebook_accel import Accelerator

    accelerator = Accelerator()
    return accelerator.num_processes, accelerator.mixed_precision, accelerator.gradient_accumulation_steps


def test_a_launch_by_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"there is no default config at .*: write_basic_config\(\) writes one"
    ):
        notebook_launcher(tell, config="default")
    values = {
        "num_processes": 2,
        "use_cpu": True,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
    }
    path = LaunchConfig.model_validate(values).write(file.default_path())
    assert notebook_launcher(tell, config="default") == (2, "bf16", 3)
    assert notebook_launcher(tell, config=path, mixed_precision="no") == (2, "no", 3)
    with pytest.raises(TypeError, match="config is a int"):
        notebook_launcher(tell, config=3)  # type: ignore[arg-type]


def inherited() -> dict[str, str | None]:
    names = ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS", "USE_CPU", "DEBUG_MODE")
    return {name: os.environ.get(f"ACCELERATE_{name}") for name in names}


def test_what_a_file_says_counts_more_than_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    path = tmp_path / "c.yaml"
    path.write_text("num_processes: 2\nuse_cpu: true\n")
    silent = notebook_launcher(inherited, config=path)
    assert silent["GRADIENT_ACCUMULATION_STEPS"] == "4" and silent["DEBUG_MODE"] == "1"
    assert "dry launch: rank 1 of 2" in capfd.readouterr().out
    with path.open("a") as more:
        more.write("mixed_precision: 'no'\ngradient_accumulation_steps: 1\ndebug: false\n")
    for config in (path, LaunchConfig.read(path), LaunchConfig.read(path).with_options(same_network=True)):
        assert notebook_launcher(inherited, config=config) == {
            "MIXED_PRECISION": "no",
            "GRADIENT_ACCUMULATION_STEPS": "1",
            "USE_CPU": "true",
            "DEBUG_MODE": "false",
        }
    assert "dry launch" not in capfd.readouterr().out
    told = notebook_launcher(
        inherited, config=path, mixed_precision="fp16", environment={"ACCELERATE_DEBUG_MODE": "0"}
    )
    assert (told["MIXED_PRECISION"], told["DEBUG_MODE"]) == ("fp16", "0")


def test_options_that_nobody_chose_stay_so() -> None:
    config = LaunchConfig(num_processes=2).with_options(use_cpu=False, fsdp_config={"fsdp_version": 2})
    assert chosen_names(config) == {"num_processes", "use_cpu", "fsdp_config.fsdp_version"}


def test_a_config_that_asks_for_it_makes_a_dry_launch(capfd: pytest.CaptureFixture[str]) -> None:
    config = LaunchConfig(num_processes=2, use_cpu=True, debug=True)
    assert notebook_launcher(inherited, config=config)["DEBUG_MODE"] == "true"
    assert "dry launch: rank 1 of 2" in capfd.readouterr().out


def threads() -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def test_threads_of_a_config_are_those_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = LaunchConfig(num_processes=2, use_cpu=True, num_cpu_threads_per_process=3)
    assert notebook_launcher(threads, config=config) == (3, "3")
    monkeypatch.setattr("notebook_accel.devices.share_of_cores", lambda number: 8 // number)
    assert notebook_launcher(threads, num_processes=2) == (4, "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert notebook_launcher(threads, num_processes=2) == (5, "5")


def ranks() -> tuple[str | None, str | None]:
    return os.environ.get("LOCAL_RANK"), os.environ.get("WORLD_SIZE")


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_library_that_shards_finds_ranks_for_one_process_too(kind: str) -> None:
    if kind == "DEEPSPEED":
        pytest.importorskip("deepspeed")
    config = LaunchConfig(distributed_type=kind, num_processes=1, use_cpu=True)  # type: ignore[arg-type]
    assert notebook_launcher(ranks, config=config) == ("0", "1")
    assert notebook_launcher(ranks, config=LaunchConfig(num_processes=1, use_cpu=True)) == (None, None)


def test_a_basic_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = basic.write_basic_config("bf16")
    assert path == file.default_path()
    assert file.read(path).config == basic.detect(mixed_precision="bf16")
    before = path.read_text()
    assert basic.write_basic_config("fp16") is None and path.read_text() == before
    assert "left as it is" in capsys.readouterr().out
    assert basic.write_basic_config("fp16", overwrite=True) == path
    assert file.read(path).config.mixed_precision == "fp16"
    with pytest.raises(ConfigError, match="mixed_precision 'half' is none of no, fp16, bf16, fp8"):
        basic.write_basic_config("half", tmp_path / "other.yaml")
    with pytest.raises(ConfigError, match="is a folder: name a file"):
        basic.write_basic_config(save_location=tmp_path)
    assert json.loads(Path(str(basic.write_basic_config(save_location=tmp_path / "c.json"))).read_text())


def test_a_basic_config_is_not_for_a_device_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "KINDS", (replace(devices.CUDA, counter=lambda: 0), devices.CPU))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    with pytest.raises(ConfigError, match="ACCELERATE_TORCH_DEVICE='cuda': this machine has no CUDA GPU"):
        basic.write_basic_config(save_location=tmp_path / "c.yaml")
    assert not list(tmp_path.iterdir())


def test_workers_do_not_import_the_schema() -> None:
    code = "import sys, notebook_accel; print({m.partition('.')[0] for m in sys.modules} & {'pydantic', 'ruamel'})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "set()"


def test_what_is_not_built_is_refused_in_the_workers() -> None:
    config = LaunchConfig(distributed_type="MEGATRON_LM", num_processes=2, use_cpu=True)
    with pytest.raises(NotImplementedError, match="Megatron-LM is not supported"):
        notebook_launcher(tell, config=config)
