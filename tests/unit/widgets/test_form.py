"""Tests for the form of launch options, through its widgets and without them."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
from hypothesis import given, settings

from notebook_accel import ConfigError
from notebook_accel.config import basic, file
from notebook_accel.config.schema import LaunchConfig, flat_values, table
from notebook_accel.widgets import ConfigForm
from tests.unit.config_values import configs


@pytest.fixture
def form(tmp_path: Path) -> ConfigForm:
    return ConfigForm(LaunchConfig(), path=tmp_path / "c.yaml")


def shown(form: ConfigForm) -> list[str]:
    """Return the names of the options in the form, from top to bottom."""
    names = {id(field.row): name for name, field in form.view.fields.items()}
    (options,) = [box for box in form.view.box.children if isinstance(box, ipywidgets.VBox)]
    return [names[id(row)] for group in options.children for row in group.children[1:]]


def choose(form: ConfigForm, name: str, value: Any) -> None:
    """Do as a user does: choose a value, or type its text."""
    form.view.fields[name].control.value = value


def sentence(form: ConfigForm, name: str) -> str:
    """Return what the form says is wrong beside a field."""
    note = form.view.fields[name].row.children[1].value
    return html.unescape(note.partition('role="alert">')[2].partition("</div>")[0])


def heard(form: ConfigForm) -> str:
    return str(form.view.status.value)


def test_it_starts_from_the_machine_without_a_device_initialised() -> None:
    assert ConfigForm().config == basic.detect()


def test_fields_are_those_that_matter(form: ConfigForm) -> None:
    assert "num_processes" in shown(form) and "machine_rank" not in shown(form)
    assert not any(name.startswith("fsdp_config") for name in shown(form))
    choose(form, "distributed_type", "FSDP")
    assert "fsdp_config.fsdp_transformer_layer_cls_to_wrap" in shown(form)
    choose(form, "fsdp_config.fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")
    assert "fsdp_config.fsdp_transformer_layer_cls_to_wrap" not in shown(form)
    assert "fsdp_config.fsdp_min_num_params" in shown(form)
    choose(form, "num_machines", "2")
    assert shown(form).index("machine_rank") == shown(form).index("num_machines") + 1
    choose(form, "num_machines", "two")
    assert "machine_rank" in shown(form), "a half-typed number changes nothing else"


def test_expert_options_come_when_asked_for(form: ConfigForm) -> None:
    few = shown(form)
    assert "role" not in few
    form.view.all_options.value = True
    assert {"role", *few} < set(shown(form))
    form.view.all_options.value = False
    assert shown(form) == few


def test_every_option_has_a_label_its_help_and_no_check_of_its_own(form: ConfigForm) -> None:
    form.view.all_options.value = True
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        choose(form, "distributed_type", kind)
    fields = form.view.fields
    assert len(fields) > 80
    for option in table():
        if option.name in fields:
            assert fields[option.name].control.description == option.path[-1]
            help = option.help.partition("`")[0].partition("'")[0]
            assert help in fields[option.name].row.children[1].value


WRONG = [
    ("num_processes", "two"),
    ("num_processes", "0"),
    ("main_process_port", "70000"),
    ("gpu_ids", "a,b"),
    ("num_cpu_threads_per_process", "1.5"),
]


@pytest.mark.parametrize(("name", "text"), WRONG, ids=str)
def test_a_wrong_value_is_refused_in_the_words_of_the_file(form: ConfigForm, name: str, text: str) -> None:
    path = form.path
    path.write_text(f"{name}: {text}\n")
    with pytest.raises(ConfigError) as by_file:
        file.read(path)
    assert shown(form)
    choose(form, name, text)
    assert sentence(form, name) == by_file.value.problems[0].text
    assert form.view.fields[name].control.value == text, "what was typed stays"
    assert form.view.save.disabled and html.escape(sentence(form, name)) in form.view.preview.value
    with pytest.raises(ConfigError, match=name) as by_form:
        _ = form.config
    assert [problem.text for problem in by_form.value.problems] == [by_file.value.problems[0].text]
    choose(form, name, "")
    assert sentence(form, name) == "" and not form.view.save.disabled
    assert form.config == LaunchConfig()


def test_what_does_not_go_together_is_said_beside_the_first(form: ConfigForm) -> None:
    assert shown(form)
    choose(form, "num_machines", "2")
    choose(form, "num_processes", "3")
    assert sentence(form, "num_processes") == "num_processes 3 is no multiple of num_machines 2"
    choose(form, "num_processes", "4")
    choose(form, "machine_rank", "1")
    assert form.config.machine_rank == 1
    choose(form, "num_machines", "1")
    assert "machine_rank" in shown(form), "else nobody could mend it"
    assert sentence(form, "machine_rank").startswith("machine_rank 1 >= num_machines 1")
    choose(form, "machine_rank", "0")
    assert "machine_rank" not in shown(form) and form.config == LaunchConfig(num_processes=4)


def test_typing_is_not_disturbed(form: ConfigForm) -> None:
    assert shown(form)
    control = form.view.fields["num_machines"].control
    row = form.view.fields["num_machines"].row
    for text in ("", "1", "12", " 12"):
        control.value = text
        assert control.value == text
    assert form.view.fields["num_machines"].row is row and form.config.num_machines == 12


def test_the_preview_is_the_file(form: ConfigForm) -> None:
    assert shown(form)
    choose(form, "mixed_precision", "bf16")
    choose(form, "gradient_accumulation_steps", "4")
    text = html.unescape(form.view.preview.value.partition(">")[2].removesuffix("</pre>"))
    assert text == form.save().read_text()
    assert "mixed_precision: bf16" in text and "gradient_accumulation_steps: 4" in text


def test_save_asks_before_it_overwrites(form: ConfigForm) -> None:
    view = form.view
    view.save.click()
    assert f"Saved {form.path}" in heard(form)
    choose(form, "num_processes", "2")
    view.save.click()
    assert view.save.description == "Overwrite?" and file.read(form.path).config.num_processes is None
    choose(form, "num_processes", "3")
    assert view.save.description == "Save", "the question was about something else"
    view.save.click()
    view.save.click()
    assert view.save.description == "Save" and file.read(form.path).config.num_processes == 3
    view.save.click()
    view.path.value = str(form.path.with_name("other.yaml"))
    assert view.save.description == "Save"
    view.save.click()
    assert file.read(form.path.with_name("other.yaml")).config.num_processes == 3


def test_saving_from_code(form: ConfigForm, tmp_path: Path) -> None:
    assert form.save() == tmp_path / "c.yaml"
    with pytest.raises(FileExistsError, match=r"c\.yaml is there already: overwrite=True replaces it"):
        form.save()
    form.set(num_processes=2)
    assert form.save(overwrite=True) == tmp_path / "c.yaml"
    assert form.save(tmp_path / "new" / "d.json") == tmp_path / "new" / "d.json"
    assert form.view.path.value == str(tmp_path / "new" / "d.json")
    with pytest.raises(ConfigError, match="is a folder: name a file"):
        form.save(tmp_path)
    form.set(num_processes="x")
    with pytest.raises(ConfigError, match="num_processes 'x' is no whole number"):
        form.save(tmp_path / "e.yaml")
    assert not (tmp_path / "e.yaml").exists()


@pytest.mark.parametrize("name", ["c.txt", "missing/there.yaml"])
def test_a_file_that_cannot_be_read_or_written_is_said(form: ConfigForm, tmp_path: Path, name: str) -> None:
    form.view.path.value = str(tmp_path / name)
    form.view.load.click()
    assert 'role="alert"' in heard(form) and name in heard(form)
    if name == "c.txt":
        form.view.save.click()
        assert 'role="alert"' in heard(form) and "does not end in .yaml" in heard(form)
    assert form.config == LaunchConfig()


def test_load_shows_what_the_file_says(form: ConfigForm) -> None:
    assert shown(form)
    form.path.write_text("num_processes: 4\ndistributed_type: FSDP\nipex_config: {ipex: true}\n")
    form.view.load.click()
    assert form.view.fields["num_processes"].control.value == "4"
    assert "fsdp_config.fsdp_version" in shown(form)
    assert f"Loaded {form.path}" in heard(form) and "ipex_config means nothing any more" in heard(form)
    before = form.config
    form.path.write_text("num_processes: 4\nmixed_precision: half\n")
    form.view.load.click()
    assert "c.yaml:2: mixed_precision &#x27;half&#x27; is none of no, fp16" in heard(form)
    assert form.config == before


@settings(max_examples=40, deadline=None)
@given(config=configs())
def test_a_config_comes_back(config: LaunchConfig) -> None:
    form = ConfigForm(config)
    form.view.all_options.value = True
    assert form.config == config
    form.set(num_processes="wrong")
    form.set(num_processes=config.num_processes)
    assert form.config == config


@settings(max_examples=40, deadline=None)
@given(config=configs())
def test_every_option_can_be_chosen_by_hand(config: LaunchConfig) -> None:
    model = ConfigForm(config)
    model.view.all_options.value = True
    form = ConfigForm(LaunchConfig())
    form.view.all_options.value = True
    values = flat_values(config)
    for name in values:  # in this order, choices come before the fields that they show
        if name in model.view.fields and name in shown(form):
            choose(form, name, model.view.fields[name].control.value)
    by_hand = {name: values[name] for name in form.view.fields if name in shown(form)}
    assert by_hand == {name: flat_values(form.config)[name] for name in by_hand}
    assert set(shown(form)) == set(shown(model))


def test_a_source_is_taken_as_a_launch_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no default config"):
        ConfigForm("default")
    path = LaunchConfig.model_validate({"num_processes": 3}).write(file.default_path())
    assert ConfigForm("default").config.num_processes == 3
    assert ConfigForm("default").path == ConfigForm().path == ConfigForm(path).path == path


def test_set_names_what_no_option_is_called(form: ConfigForm) -> None:
    form.set(fsdp_config__fsdp_version=2, use_cpu=True)
    assert form.config.fsdp_config.fsdp_version == 2 and form.config.use_cpu
    with pytest.raises(TypeError, match="num_proceses: no option is called so"):
        form.set(num_proceses=2)


def test_wrong_values_from_code_are_shown_in_any_field(form: ConfigForm) -> None:
    assert shown(form)
    form.set(use_cpu="maybe", mixed_precision="half", num_machines=0)
    for name in ("use_cpu", "mixed_precision", "num_machines"):
        assert sentence(form, name).startswith(name)
    form.set(use_cpu="yes", mixed_precision="bf16", num_machines=1)
    assert form.view.fields["use_cpu"].control.value is True
    assert form.config == LaunchConfig(use_cpu=True, mixed_precision="bf16")


def tell() -> str:
    from notebook_accel import Accelerator

    return f"{Accelerator().num_processes} {Accelerator().mixed_precision}"


def test_launch_runs_the_function_with_the_config() -> None:
    form = ConfigForm(LaunchConfig(num_processes=2, use_cpu=True, mixed_precision="bf16"), function=tell)
    assert form.launch() == form.result == "2 bf16"


def test_launch_without_a_function(form: ConfigForm) -> None:
    assert form.view.launch is None
    with pytest.raises(TypeError, match="nothing to launch"):
        form.launch()


def fail() -> None:
    raise OSError("disk gone")


def test_the_button_launches_and_can_be_clicked_again(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    form = ConfigForm(LaunchConfig(num_processes=2, use_cpu=True), function=tell)
    form.view.launch.click()
    assert form.result == "2 no" and not form.view.launch.disabled
    assert "Launching tell on 2 CPU processes" in capsys.readouterr().out
    form.function = fail
    form.view.launch.click()
    assert "OSError: disk gone" in caplog.text, "where no kernel shows it, ipywidgets logs it"
    assert not form.view.launch.disabled and "Running" not in heard(form)


def test_it_prints_as_a_table(form: ConfigForm) -> None:
    form.set(num_processes="two")
    lines = repr(form).splitlines()
    assert lines[0] == "Launch" and "torch.compile" in lines
    (number,) = [number for number, line in enumerate(lines) if line.startswith("num_processes ")]
    assert "two" in lines[number] and "Processes on all nodes" in lines[number]
    assert lines[number + 1].endswith("^ num_processes 'two' is no whole number")
    assert form._repr_mimebundle_() == {"text/plain": repr(form)}, "nothing shows widgets here"


def test_without_ipywidgets(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["ipywidgets"] = None
from notebook_accel.widgets import ConfigForm
form = ConfigForm(path={str(tmp_path / "c.yaml")!r})
form.set(num_processes=2)
print(form)
form.load(form.save())
assert form.config.num_processes == 2
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "num_processes" in done.stdout and "torch" in done.stdout
