"""What the process of a rank on another machine gets."""

from __future__ import annotations

import pickle

import pytest

from notebook_accel.launch.engines.remote.rank_process import ProcessStart, Work, make_handover
from notebook_accel.launch.transfer.pickled import Pickled
from notebook_accel.launch.transfer.shared_memory import SharedPickle
from notebook_accel.trust import secret


def test_a_worker_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds its process may have been started by the process that has it."""
    monkeypatch.setenv(secret.VARIABLE, "correct horse battery staple")
    start = ProcessStart(variables={"A": "b"}, path=[], directory="/", with_ipython=False)
    work = Work(
        rank=0, variables={"C": "d"}, is_alone=True, address="127.0.0.1", sends_value=False, notes=b""
    )
    payload = SharedPickle(Pickled(data=b"x", buffers=[]))
    try:
        handover = pickle.loads(
            make_handover(start, work, payload, [], fallbacks={"A": "less", "E": "f"}, threads=3)
        )
    finally:
        payload.close()
    variables = handover.environment
    assert variables["A"] == "b" and variables["C"] == "d" and variables["E"] == "f"
    assert "PATH" in variables and secret.VARIABLE not in variables
    assert handover.threads == 3 and handover.directory == "/"
