"""What ends a run that should outlive its notebook, as far as the machine tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from notebook_accel.launch.checks import outliving

USER = "0::/user.slice/user-1000.slice/session-3.scope\n"
SERVICE = "0::/system.slice/jupyter-ada.service\n"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing ends what a user leaves."""
    for name in (*outliving._HOSTED, "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(outliving, "_CONTAINER_FILES", (tmp_path / "container",))
    monkeypatch.setattr(outliving, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(outliving, "_LOGIND", (tmp_path / "logind.conf", tmp_path / "logind.conf.d"))
    monkeypatch.setattr(outliving, "_LINGER", tmp_path / "linger")
    monkeypatch.setattr(outliving.getpass, "getuser", lambda: "ada")
    (tmp_path / "logind.conf.d").mkdir()
    (tmp_path / "linger").mkdir()
    (tmp_path / "cgroup").write_text(USER)
    (tmp_path / "logind.conf").write_text("[Login]\n#KillUserProcesses=yes\n")
    return tmp_path


def test_an_ordinary_login_is_no_end(machine: Path) -> None:
    assert outliving.describe_killer() == ""
    (machine / "cgroup").write_text(
        "12:pids:/user.slice\n0::/user.slice/user-1000.slice/user@1000.service/x\n"
    )
    assert outliving.describe_killer() == ""


def test_a_login_whose_processes_are_killed(machine: Path) -> None:
    (machine / "logind.conf.d" / "site.conf").write_text("[Login]\nKillUserProcesses = yes\n")
    assert outliving.describe_killer() == (
        "It ends with the last login of this user (KillUserProcesses=yes), unless you say `loginctl enable-linger`."
    )
    (machine / "linger" / "ada").touch()
    assert outliving.describe_killer() == ""


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("COLAB_RELEASE_TAG", "Colab's machine"),
        ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle's session"),
        ("SLURM_JOB_ID", "job 1 of SLURM, which this notebook runs in"),
        ("KUBERNETES_SERVICE_HOST", "this container"),
    ],
)
def test_places_that_end(variable: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    assert outliving.describe_killer() == f"It ends with {words}."


def test_a_container_and_a_service(machine: Path) -> None:
    (machine / "cgroup").write_text(SERVICE)
    assert outliving.describe_killer() == (
        "It ends with the service jupyter-ada.service, which this notebook runs in."
    )
    (machine / "container").touch()
    assert outliving.describe_killer() == "It ends with this container."
