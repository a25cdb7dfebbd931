"""Command lines of the client, and what it says where it fails."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from notebook_accel.launch.engines.remote.client import NO_PACKAGE, Wanted
from notebook_accel.launch.engines.ssh.command import SshClient, explain_failure

WANTED = Wanted(python="3.11", torch="2.13.0", package="0.1", with_ipython=False, takes_over=False)


def test_the_client_never_asks_and_gets_one_line() -> None:
    line = SshClient(("ssh", "-F", "x")).make_command("me@gpu1", None, "abc", WANTED)
    assert line[:3] == ["ssh", "-F", "x"] and line[-3:-1] == ["--", "me@gpu1"]
    assert "BatchMode=yes" in line and any(word.startswith("ServerAliveInterval=") for word in line)
    assert "\n" not in line[-1] and "!" not in line[-1], "shells as csh take neither"


@pytest.mark.parametrize("python", ["/no/python", "/no/it's here/python", "~/no/python"])
def test_a_login_shell_runs_the_line(python: str) -> None:
    line = SshClient(("ssh",)).make_command("gpu1", python, "abc", WANTED)[-1]
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (NO_PACKAGE, "", "")


def test_a_python_says_what_it_is() -> None:
    line = SshClient(("ssh",)).make_command("gpu1", f"{sys.executable}", "abc", WANTED)[-1]
    other = line.replace(shlex.quote(sys.executable), "/no/python")
    assert other == line or "/no/python" in other
    wrong = Wanted(python="2.7", torch="", package="", with_ipython=False, takes_over=False)
    line = SshClient(("ssh",)).make_command("gpu1", sys.executable, "abc", wrong)[-1]
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("\nnotebook_accel:abc:{") and '"python": "3.' in done.stdout


@pytest.mark.parametrize(
    ("code", "said", "text"),
    [
        (255, "Host key verification failed.", "its host key is unknown here: run `ssh u@h` once"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-keygen -R h",
        ),
        (255, "u@h: Permission denied (publickey,password).", "would have to ask for a password"),
        (
            255,
            "ssh: connect to host h port 22: Connection refused",
            "ssh does not reach it (ssh: connect to host h port 22: Connection refused)",
        ),
        (255, "", "ssh does not reach it (it says nothing)"),
        (
            None,
            "",
            "ssh still runs, and no Python has started there (nothing was said): try `ssh u@h python3 -V`",
        ),
        (127, "Welcome!\nsh: 1: exec: sh: not found", "has started there (sh: 1: exec: sh: not found)"),
    ],
)
def test_why_a_client_failed(code: int | None, said: str, text: str) -> None:
    sentence = explain_failure("u@h", code, said.splitlines())
    assert sentence.startswith("host u@h: ") and text in sentence
