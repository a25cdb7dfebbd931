"""A wrong value has one sentence, wherever it is given: file, flag, questionnaire, form, Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from notebook_accel import ConfigError
from notebook_accel.cli import flags, questions
from notebook_accel.config import file
from notebook_accel.config.schema import LaunchConfig
from notebook_accel.widgets import ConfigForm
from notebook_accel.widgets.draft import read_text
from tests.unit.config_values import OPTIONS, beside, nested

WRONG = [
    ("use_cpu", "maybe", "use_cpu 'maybe' is neither true nor false"),
    ("debug", "2", None),
    ("deepspeed_config.zero3_init_flag", "perhaps", "zero3_init_flag 'perhaps' is neither true nor false"),
    ("num_processes", "0", "num_processes 0 is less than 1"),
    ("num_processes", "two", "num_processes 'two' is no whole number"),
    ("num_processes", "1.5", "num_processes 1.5 is no whole number"),
    ("max_restarts", "-1", "max_restarts -1 is less than 0"),
    ("main_process_port", "70000", "main_process_port 70000 is more than 65535"),
    ("main_process_port", "-1", "main_process_port -1 is less than 0"),
    ("main_process_port", "http", "main_process_port 'http' is no whole number"),
    ("monitor_interval", "0", "monitor_interval 0 is not more than 0"),
    ("monitor_interval", "soon", "monitor_interval 'soon' is no number"),
    (
        "megatron_lm_config.megatron_lm_attention_dropout",
        "1.5",
        "megatron_lm_attention_dropout 1.5 is more than 1",
    ),
    ("mixed_precision", "bf17", "mixed_precision 'bf17' is none of no, fp16, bf16, fp8"),
    (
        "dynamo_config.dynamo_mode",
        "fast",
        "dynamo_mode 'fast' is none of default, reduce-overhead, max-autotune",
    ),
    ("fsdp_config.fsdp_version", "3", "fsdp_version 3 is none of 1, 2"),
    ("fsdp_config.fsdp_sharding_strategy", "some", None),
    ("fsdp_config.fsdp_reshard_after_forward", "maybe", None),
    ("deepspeed_config.gradient_clipping", "-1", "gradient_clipping -1 is less than 0"),
    ("deepspeed_config.gradient_clipping", "x", "gradient_clipping 'x' is no number"),
    ("gpu_ids", "a,b", "gpu_ids 'a,b' does not look like 0,1; `all` for all"),
    ("rdzv_conf", "timeout", None),
    ("main_training_function", "1a", None),
    ("fp8_config.override_linear_precision", "true,maybe,false", None),
]


def typed(name: str, text: str) -> Any:
    """Return what a text means in YAML; a list where the option is one."""
    if OPTIONS[name].kind is tuple:
        return [typed("use_cpu", part) for part in text.split(",")]
    return YAML(typ="safe").load(text)


def of_python(name: str, text: str, folder: Path) -> list[str]:
    return failing(lambda: LaunchConfig(**nested({name: typed(name, text)})))


def of_file(name: str, text: str, folder: Path) -> list[str]:
    value = f"[{text}]" if OPTIONS[name].kind is tuple else text
    *section, last = name.split(".")
    lines = [*(f"{part}:" for part in section), f"{'  ' if section else ''}{last}: {value}"]
    (folder / "c.yaml").write_text("\n".join(lines) + "\n")
    return failing(lambda: file.read(folder / "c.yaml"))


def of_flag(name: str, text: str, folder: Path) -> list[str]:
    return failing(lambda: flags.apply(LaunchConfig(), {name.replace(".", "__"): text}))


def of_questions(name: str, text: str, folder: Path) -> list[str]:
    option = OPTIONS[name]
    asking = questions.Questionnaire(lambda answers: LaunchConfig(), {})
    return [asking._problem(option, questions._value(option, text, None))]


def of_form(name: str, text: str, folder: Path) -> list[str]:
    option = OPTIONS[name]
    form = ConfigForm(LaunchConfig())
    form.view.all_options.value = True
    others = {**beside(option, None)}
    form.set(**{other.replace(".", "__"): value for other, value in others.items()})
    value = read_text(option, text.replace(",", "\n") if option.kind is tuple else text)
    form.set(**{name.replace(".", "__"): value})
    return failing(lambda: form.config)


def failing(make: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make()
    return [problem.text for problem in caught.value.problems]


@pytest.mark.parametrize(("name", "text", "sentence"), WRONG)
def test_a_wrong_value_has_the_same_sentence_everywhere(
    name: str, text: str, sentence: str | None, tmp_path: Path
) -> None:
    faces = [of_python, of_file, of_questions, of_form]
    if OPTIONS[name].face.flag is not None:
        faces.append(of_flag)
    found = {face.__name__: face(name, text, tmp_path) for face in faces}
    (first,) = {tuple(told) for told in found.values()}
    assert len(first) == 1 and first[0].startswith(f"{name.rpartition('.')[2]} ")
    assert sentence is None or first[0] == sentence


def test_every_kind_of_option_is_among_them() -> None:
    kinds = {(option.kind, option.choices is not None) for option in OPTIONS.values() if option.face.flag}
    tried = {(OPTIONS[name].kind, OPTIONS[name].choices is not None) for name, _, _ in WRONG}
    assert kinds == tried
