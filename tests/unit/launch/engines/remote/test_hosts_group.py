"""What an error of a rank on a host says, and what events of many hosts cost."""

from __future__ import annotations

from notebook_accel.events import RaisedError
from notebook_accel.launch.engines.remote import hosts_group


def test_what_is_missing_is_told_with_its_host() -> None:
    def note(kind: str, message: str) -> str:
        error = hosts_group._add_host(
            RaisedError(type_name=kind, message=message, pickled=None, frames=(), notes=("own",)),
            3,
            "host gpu2",
        )
        assert error is not None and error.notes[0] == "own"
        return " ".join(error.notes[1:])

    assert note("FileNotFoundError", "x").startswith("rank 3 is on host gpu2, and the file is not there")
    assert note("ModuleNotFoundError", "x").startswith("rank 3 is on host gpu2, and the module is not there")
    assert note("RuntimeError", "open: No such file or directory").startswith("rank 3 is on host gpu2")
    assert note("ValueError", "x") == ""
