"""Interrupts that wait until a block is done."""

from __future__ import annotations

import pytest

from notebook_accel.launch import signals


def test_interrupts_are_held_by_the_outermost_block() -> None:
    import signal

    done = []
    with pytest.raises(KeyboardInterrupt), signals.delay_interrupt():
        with signals.delay_interrupt():
            signal.raise_signal(signal.SIGINT)
        done.append("goes on")
    assert done == ["goes on"]
