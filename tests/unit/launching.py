"""Launches by the command, for tests: dry ones in this process, real ones in a copy of it."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner, Result

from notebook_accel import probes
from notebook_accel.cli.launch import launch
from notebook_accel.cli.main import cli, main
from notebook_accel.cli.plan import Plan, resolve
from tests import forker

ROOT = Path(__file__).resolve().parents[2]
TWO = ("--cpu", "--num_processes", "2")
_GLOO = re.compile(
    r"(\[\w+\]:)?\[Gloo\] Rank \d+ is connected to \d+ peer ranks\."
    r" Expected number of connected peer ranks is : \d+\n?"
)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder with a script, no GPU, no default config, and an environment that says nothing."""
    for name in [
        n for n in os.environ if n.startswith("ACCELERATE_") or n in ("OMP_NUM_THREADS", "LOGLEVEL")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')\n")
    yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)


def dry(*words: str) -> Result:
    return CliRunner().invoke(
        cli, ["launch", "--dry-run", *words, *([] if "x.ipynb" in words else ["train.py"])]
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the sentences that a launch ends with before anything starts."""
    with pytest.raises(SystemExit) as stop:
        main(["launch", *words])
    assert stop.value.code == 2
    found = capsys.readouterr()
    assert found.out == ""
    return found.err.replace("Error: ", "").splitlines()


def plan_of(*words: str, config_file: str | None = None) -> Plan:
    with launch.make_context("launch", [*words, "train.py"]) as ctx:
        return resolve(ctx.params, config_file)[0]


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Return value and source of each name that a dry run prints."""
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith("  ")]
    return {words[0]: (words[1], words[2]) for words in lines if len(words) == 3}


def drop_gloo(text: str) -> str:
    """Return output without the line that gloo of torch 2.8 to 2.10 prints for each process of a group."""
    return text if probes.at_least("torch", "2.11") else _GLOO.sub("", text)


@dataclasses.dataclass
class Launched:
    """A launch in a copy of this process, which spares it torch's import; that of a notebook by `tests/forker.py`.

    Jupyter's libraries keep the event loop that they were first used with, whose descriptor a copy has not.
    """

    words: tuple[str, ...]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        reading, writing = os.pipe()
        self.errors = Path(tempfile.mkdtemp(dir=".")) / "stderr"
        self.errors.touch()  # a test may look before the launch has begun
        if any(word.endswith(".ipynb") for word in self.words):
            self.pid = self._start(writing)
        else:
            self.pid = os.fork()
        if self.pid == 0:
            self._launch(writing)
        os.close(writing)
        self.out = os.fdopen(reading, encoding="utf-8")

    def _start(self, writing: int) -> int:
        command = [sys.executable, "-m", "notebook_accel", "launch", *self.words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.environment}
        with open(self.errors, "w") as errors:
            self.process = forker.start(
                command,
                libraries=["nbclient"],  # its schemas take seconds
                stdout=writing,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        return self.process.pid

    def _launch(self, writing: int) -> NoReturn:
        code = 99
        try:
            os.dup2(writing, 1)
            os.dup2(os.open(self.errors, os.O_CREAT | os.O_WRONLY), 2)
            self._lead_nowhere()
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ.update(self.environment)
            main(["launch", *self.words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _lead_nowhere(self) -> None:
        """Keep nothing open of other tests: their objects are still here, and close what they own when they go."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in [int(name) for name in os.listdir("/dev/fd")]:
            if fd > 2 and fd != nowhere:
                os.dup2(nowhere, fd, inheritable=False)

    def wait(self) -> tuple[int, str, str]:
        """Return exit code, output and errors."""
        with self.out:
            text = drop_gloo(self.out.read())
        if hasattr(self, "process"):
            code = self.process.wait()
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, text, self.errors.read_text()


def run(*words: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """Return output and errors of a launch that ends with a code."""
    found, out, errors = Launched(words, environment).wait()
    assert found == code, (found, out, errors)
    return out, errors
