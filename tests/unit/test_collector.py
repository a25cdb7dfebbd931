"""Python looks for garbage after an import or a sharding, not in the middle of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest

from notebook_accel import collector


def test_it_waits_and_goes_on() -> None:
    assert gc.isenabled()
    with collector.pause():
        with collector.pause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_inside_lets_it_go_on() -> None:
    with pytest.raises(KeyboardInterrupt), collector.pause():
        raise KeyboardInterrupt
    assert gc.isenabled()


def test_one_that_the_user_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with collector.pause():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "imports",
    [
        "from notebook_accel import Accelerator",
        "import notebook_accel; notebook_accel.take_over_accelerate(); from accelerate import Accelerator",
    ],
)
def test_an_import_is_not_held_up(imports: str) -> None:
    """Else a look at all that torch has made, which takes as long, would fall into it."""
    script = f"""
        import gc, torch
        gc.set_threshold(1, 1, 1)  # looks at everything as often as can be
        looks = []
        gc.callbacks.append(lambda phase, info: phase == "start" and looks.append(len(__import__("sys").modules)))
        import sys
        {imports}
        gc.callbacks.clear()
        assert gc.isenabled()
        whole = sum(name.startswith("notebook_accel") for name in sys.modules)
        print(whole, len(set(looks)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    ours, seen = map(int, done.stdout.split())
    assert ours > 50
    assert seen < ours / 2  # it looked while so many of the modules were made
