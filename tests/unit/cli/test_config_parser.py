"""Tests for the parsers and functions of `config` that programs call."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import rich_click as click
from accelerate.commands import config as reference
from accelerate.commands.config import update as reference_update

from notebook_accel.cli import config_parser
from notebook_accel.cli.config_parser import get_config_parser
from notebook_accel.utils.cluster import load_config_from_file


@pytest.mark.parametrize(
    "line", ["", "--config_file a.yaml", "default --config_file a.yaml --mixed_precision bf16", "update"]
)
def test_words_are_read_as_accelerates_parser_reads_them(line: str) -> None:
    def parse(get_parser: object) -> dict[str, object]:
        parser = argparse.ArgumentParser()
        get_parser(parser.add_subparsers())  # type: ignore[operator]
        found = vars(parser.parse_args(["config", *line.split()]))
        return {**found, "func": found["func"].__name__}

    assert parse(get_config_parser) == parse(reference.get_config_parser)


def test_a_default_config_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    args = get_config_parser().parse_args(
        ["default", "--config-file", str(path), "--mixed_precision", "bf16"]
    )
    args.func(args)
    assert f"Wrote {path}" in capsys.readouterr().out
    assert load_config_from_file(path).mixed_precision == "bf16"
    path.write_text("num_processes: 1\n")
    args.func(args)
    assert path.read_text() == "num_processes: 1\n"


def test_an_older_file_is_updated(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("# mine\ndistributed_type: 'NO'\nfp16: true\nnum_processes: 1\n")
    args = get_config_parser().parse_args(["update", "--config_file", str(path)])
    assert config_parser.update_config(args) == str(path)
    assert "# mine" in path.read_text() and "mixed_precision: fp16" in path.read_text()
    args.config_file = str(tmp_path / "none.yaml")
    for update in (config_parser.update_config, reference_update.update_config):
        with pytest.raises(ValueError, match=r"none\.yaml"):
            update(args)


def test_questions_need_a_terminal() -> None:
    with pytest.raises(click.UsageError, match="no terminal"):
        config_parser.config_command(argparse.Namespace(config_file=None))
