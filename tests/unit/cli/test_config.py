"""Tests for `notebook-accel config`: the questionnaire in a real pseudo-terminal, defaults and updates."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from questionary import Separator

from notebook_accel import devices
from notebook_accel.cli import main, questions
from notebook_accel.config import basic, comments, file
from notebook_accel.config.option import Option
from notebook_accel.config.schema import flat_values, has_effect, table

pexpect = pytest.importorskip("pexpect", reason="needs pexpect, which is for POSIX")

DOWN, ENTER, CTRL_C, CTRL_D, CTRL_L, CTRL_U = "\x1b[B", "\r", "\x03", "\x04", "\x0c", "\x15"
QUESTION = re.compile(r"\((\w+)\) ")
COMMAND = [sys.executable, "-m", "notebook_accel", "config"]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    return {
        **kept,
        "HF_HOME": str(folder),
        "ACCELERATE_USE_CPU": "true",
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody would answer where the cursor is
    }


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def problem(self) -> str:
        """What is wrong, in one line: a long path wraps it anywhere."""
        return " ".join(self.stderr.replace("\u2502", " ").split())


class Terminal:
    """A questionnaire in a terminal, and the questions that it asked."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.asked: list[str] = []
        self.child = pexpect.spawn(
            COMMAND[0],
            [*COMMAND[1:], *arguments],
            env=environment(folder),
            encoding="utf-8",
            dimensions=(50, 160),
            timeout=120,
        )
        self.child.delaybeforesend = None

    def expect(self, text: str) -> None:
        self.child.expect_exact(text)

    def answer(self, **answers: str) -> None:
        """Answer questions by their options' names with these keys, all others with Enter, until none comes."""
        pending = dict(answers)
        while True:
            ending = ["Replace it?", "Wrote ", "Stopped", pexpect.EOF]
            which = self.child.expect([QUESTION, *map(_escaped, ending)])
            if which:
                break
            name = self.child.match.group(1)
            if self.asked and self.asked[-1] == name:
                continue  # drawn again
            self.asked.append(name)
            self.child.send(pending.pop(name, ENTER))
        assert not pending, f"never asked: {sorted(pending)}"

    def end(self) -> tuple[int, str]:
        """Return the exit code and what was still printed."""
        self.child.expect(pexpect.EOF)
        text = str(self.child.before)
        self.child.close()
        return int(self.child.exitstatus), text


def _escaped(pattern: object) -> object:
    return re.escape(pattern) if isinstance(pattern, str) else pattern


@pytest.fixture
def terminal_of() -> Iterator[Callable[..., Terminal]]:
    """Make terminals that are closed when the test ends."""
    opened: list[Terminal] = []

    def opening(folder: Path, *arguments: str) -> Terminal:
        opened.append(Terminal(folder, *arguments))
        return opened[-1]

    yield opening
    for terminal in opened:
        terminal.child.close(force=True)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run the command in this process, which has no terminal."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def running(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as left:
            main.main(["config", *arguments])
        captured = capsys.readouterr()
        return Done(returncode=int(left.value.code or 0), stdout=captured.out, stderr=captured.err)

    return running


def place(folder: Path) -> Path:
    return folder / "accelerate" / "default_config.yaml"


def test_enter_takes_what_fits_the_machine(
    terminal_of: Callable[..., Terminal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    terminal = terminal_of(tmp_path)
    terminal.answer()
    assert terminal.end()[0] == 0
    assert file.read(place(tmp_path)).config == basic.detect()
    flat = flat_values(basic.detect())
    wanted = {option.path[-1] for option in table() if has_effect(option, flat) and not option.face.expert}
    assert set(terminal.asked) == wanted
    assert len(terminal.asked) == len(wanted)


def test_arrow_keys_choose_and_bring_up_the_questions_that_then_matter(
    terminal_of: Callable[..., Terminal], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    terminal = terminal_of(tmp_path, "--config_file", str(path))
    terminal.answer(
        distributed_type=DOWN + ENTER,
        num_machines="2" + ENTER,
        machine_rank="1" + ENTER,
        main_process_ip="10.0.0.7" + ENTER,
        num_processes="4" + ENTER,
        mixed_precision=DOWN * 3 + ENTER,
        backend=ENTER,
    )
    assert terminal.end()[0] == 0
    config = file.read(path).config
    assert config.distributed_type == "MULTI_CPU"
    assert (config.num_machines, config.machine_rank, config.num_processes) == (2, 1, 4)
    assert config.main_process_ip == "10.0.0.7"
    assert config.mixed_precision == "fp8"
    assert not {name for name in terminal.asked if name.startswith(("fsdp", "zero", "tpu"))}
    assert "pad_inner_dim" in terminal.asked  # of torchao, the default
    assert "opt_level" not in terminal.asked  # of MS-AMP


def test_kinds_of_run_that_this_machine_serves_come_first(
    terminal_of: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = terminal_of(tmp_path)
    terminal.expect("(distributed_type)")
    terminal.expect("--- on other machines ---")
    above = str(terminal.child.before)
    assert "NO" in above and "MULTI_CPU" in above and "MULTI_GPU" not in above and "FSDP" not in above
    terminal.expect("MULTI_GPU")
    terminal.child.send(DOWN * 2 + ENTER)  # over the line between them
    terminal.answer()
    assert terminal.end()[0] == 0
    assert file.read(place(tmp_path)).config.distributed_type == "MULTI_GPU"


@pytest.mark.parametrize(
    ("devices_there", "use_cpu", "first"),
    [
        ("cuda", False, ["NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"]),
        ("xpu", False, ["NO", "MULTI_XPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"]),
        ("mps", False, ["NO", "MULTI_CPU"]),
        ("cuda", True, ["NO", "MULTI_CPU"]),
    ],
)
def test_what_is_offered_depends_on_the_devices(
    devices_there: str, use_cpu: bool, first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "best", lambda: devices.kind_of(devices_there))
    given = {"use_cpu": True} if use_cpu else {}
    asking = questions.Questionnaire(lambda answers: basic.detect(**answers), given)
    kinds = next(option for option in table() if option.name == "distributed_type")
    offered = asking._list_offers(kinds, questions._labels(kinds, "NO"))
    assert offered[: len(first)] == first
    assert isinstance(offered[len(first)], Separator)
    assert sorted(str(one) for one in offered if isinstance(one, str)) == sorted(kinds.choices or ())


def test_a_wrong_answer_is_refused_on_the_spot(terminal_of: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = terminal_of(tmp_path, "--num_machines", "2")
    terminal.expect("(distributed_type)")
    terminal.child.send(ENTER)
    terminal.expect("(use_cpu)")
    terminal.child.send(ENTER)
    terminal.expect("(num_processes)")
    terminal.expect("[2")  # a device on each node
    for wrong, sentence in (
        ("abc", "num_processes 'abc' is no whole number"),
        ("0", "num_processes 0 is less than 1"),
        ("3", "num_processes 3 is no multiple of num_machines 2"),
    ):
        terminal.child.send(CTRL_U + wrong + ENTER + CTRL_L)
        terminal.expect(sentence)
    terminal.child.send(CTRL_U + "6" + ENTER)
    terminal.answer()
    assert terminal.end()[0] == 0
    assert file.read(place(tmp_path)).config.num_processes == 6
    assert "num_machines" not in terminal.asked


@pytest.mark.parametrize(
    ("question", "key"), [("distributed_type", CTRL_C), ("num_processes", CTRL_C), ("num_processes", CTRL_D)]
)
def test_leaving_writes_nothing(
    terminal_of: Callable[..., Terminal], tmp_path: Path, question: str, key: str
) -> None:
    terminal = terminal_of(tmp_path)
    terminal.answer(**{question: key})
    code, text = terminal.end()
    assert code == 130
    assert terminal.asked[-1] == question
    assert "nothing was written" in text
    assert "Traceback" not in text
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_after_a_yes(terminal_of: Callable[..., Terminal], tmp_path: Path) -> None:
    path = place(tmp_path)
    path.parent.mkdir()
    path.write_text("num_processes: [broken\n")
    terminal = terminal_of(tmp_path)
    terminal.answer()
    terminal.child.send(ENTER)
    code, text = terminal.end()
    assert code == 1
    assert "Nothing was written" in text
    assert path.read_text() == "num_processes: [broken\n"
    terminal = terminal_of(tmp_path)
    terminal.answer(num_processes="3" + ENTER)
    terminal.child.send("y")
    assert terminal.end()[0] == 0
    assert file.read(path).config.num_processes == 3
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_update_with_questions_starts_from_the_file_and_keeps_what_is_not_asked(
    terminal_of: Callable[..., Terminal], tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# ours\nnum_processes: 5\nsame_network: false\nmain_process_port: 1234\n")
    terminal = terminal_of(tmp_path, "update", "--ask", "--config-file", str(path))
    terminal.answer(main_process_port="none" + ENTER)
    assert terminal.end()[0] == 0
    config = file.read(path).config
    assert (config.num_processes, config.same_network, config.main_process_port) == (5, False, None)
    assert path.read_text().startswith("# ours\n")


def test_without_a_terminal_it_says_what_to_do(run: Callable[..., Done], tmp_path: Path) -> None:
    done = run()
    assert done.returncode == 2
    assert "config default" in done.problem
    assert not list(tmp_path.iterdir())


def test_default_writes_what_write_basic_config_writes(
    run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    done = run("default", "--mixed_precision", "bf16")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.problem
    beside = basic.write_basic_config("bf16", tmp_path / "beside.yaml")
    assert beside is not None
    assert place(tmp_path).read_text() == beside.read_text()
    again = run("default")
    assert "--overwrite" in again.problem
    assert place(tmp_path).read_text() == beside.read_text()
    assert run("default", "--overwrite", "--num-processes", "4").returncode == 0
    config = file.read(place(tmp_path)).config
    assert (config.num_processes, config.distributed_type, config.mixed_precision) == (4, "MULTI_CPU", "no")


def test_a_wrong_flag_ends_with_the_sentence_of_the_schema(run: Callable[..., Done], tmp_path: Path) -> None:
    done = run("default", "--num_processes", "x", "--mixed_precision", "fp4")
    assert done.returncode == 2
    assert "num_processes 'x' is no whole number" in done.problem
    assert "mixed_precision 'fp4' is none of no, fp16, bf16, fp8" in done.problem
    assert not list(tmp_path.iterdir())


def test_a_flag_that_two_options_share_sets_both(run: Callable[..., Done], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    assert run("update", "--config_file", str(path), "--gradient_accumulation_steps", "4").returncode == 0
    config = file.read(path).config
    assert config.gradient_accumulation_steps == 4
    assert config.deepspeed_config.gradient_accumulation_steps == 4


def test_update_writes_todays_words_and_keeps_comments(run: Callable[..., Done], tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        "# ours\ndynamo_backend: INDUCTOR  # faster\nuse_xpu: true\n# all of them\nnum_processes: 8  # GPUs\n"
        "downcast_bf16: 'no'\n# the kind\ndistributed_type: MULTI_GPU\n# the end\n"
    )
    done = run("update", "--config_file", str(path))
    assert done.returncode == 0, done.stderr
    assert "use_xpu means nothing any more" in done.problem
    text = path.read_text()
    assert file.read(path).config.dynamo_config.dynamo_backend == "INDUCTOR"
    assert "# all of them\nnum_processes: 8  # GPUs\n" in text
    assert "# the kind\ndistributed_type: MULTI_GPU\n" in text
    assert "# faster\ndynamo_config:\n" in text
    for comment in ("# ours", "# faster", "# all of them", "# GPUs", "# the kind", "# the end"):
        assert text.count(comment) == 1
    again = run("update", "--config_file", str(path))
    assert (again.returncode, path.read_text()) == (0, text)


def test_update_of_no_file_and_of_a_folder(run: Callable[..., Done], tmp_path: Path) -> None:
    missing = run("update", "--config_file", str(tmp_path / "none.yaml"))
    assert (missing.returncode, "there is no file" in missing.problem) == (1, True)
    folder = run("default", "--config_file", str(tmp_path))
    assert (folder.returncode, "is a folder" in folder.problem) == (1, True)


def test_options_of_one_flag_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(self: Any, option: Option, default: Any) -> Any:
        asked.append(option.name)
        return 4 if option.name == "gradient_accumulation_steps" else default

    monkeypatch.setattr(questions.Questionnaire, "_answer", answer)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    given = {"distributed_type": "DEEPSPEED"}
    config = questions.Questionnaire(lambda answers: basic.detect(**answers), given).ask()
    assert config.gradient_accumulation_steps == config.deepspeed_config.gradient_accumulation_steps == 4
    assert [name for name in asked if "accumulation" in name] == ["gradient_accumulation_steps"]
    assert "deepspeed_config.zero_stage" in asked
    assert not [name for name in asked if name.startswith("fsdp_config")]


def test_all_asks_for_expert_options_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(self: Any, option: Option, default: Any) -> Any:
        asked.append(option)
        return default

    monkeypatch.setattr(questions.Questionnaire, "_answer", answer)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config = questions.Questionnaire(lambda answers: basic.detect(**answers), {}, every=True).ask()
    assert config == basic.detect()
    flat = flat_values(config)
    assert {option.name for option in asked} == {
        option.name for option in table() if has_effect(option, flat)
    }
    assert any(option.face.expert for option in asked)


@pytest.mark.parametrize(
    ("name", "text", "default", "value"),
    [
        ("num_processes", "", 3, 3),
        ("num_processes", " 4 ", 3, 4),
        ("num_processes", "1e1", 3, 10),
        ("num_processes", "two", 3, "two"),
        ("num_processes", "none", 3, None),
        ("tpu_vm", "a,b", (), ["a", "b"]),
        ("environment", "A=1,B=x=y", {}, {"A": "1", "B": "x=y"}),
        ("environment", "A", {}, "A"),
    ],
)
def test_what_was_typed_as_a_value(name: str, text: str, default: Any, value: Any) -> None:
    option = next(option for option in table() if option.name == name)
    assert questions._value(option, text, default) == value


@pytest.mark.parametrize(
    ("old", "new", "whole"),
    [
        ("# a\nx: 1\n", "x: 1\n", "# a\nx: 1\n"),
        ("x: 1  # a\ny: 2\n", "y: 2\n", "# a\ny: 2\n"),
        ("x: '#1'  # a\n", "x: '#1'\n", "# a\nx: '#1'\n"),
        ("x: 1\n# a\n", "y: 1\n", "y: 1\n# a\n"),
        ("# a\nx: 1\n# a\ny: 2\n", "# a\nx: 1\ny: 2\n", "# a\nx: 1\n# a\ny: 2\n"),
        ("s:\n  # a\n  old: 1\n", "s:\n  now: 1\n", "s:\n  # a\n  now: 1\n"),
        ("# a\nold: 1\n", "z: 0\ns:\n  b: 2\n  now: 1\n", "z: 0\n# a\ns:\n  b: 2\n  now: 1\n"),
    ],
)
def test_comments_that_a_new_text_lacks(old: str, new: str, whole: str) -> None:
    moved = {("old",): ("s", "now"), ("s", "old"): ("s", "now")}
    assert comments.carry_over(old, new, moved) == whole
