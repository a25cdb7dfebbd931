"""What an error of a rank on a host says, and what events of many hosts cost."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import threading
from typing import Any

from notebook_accel.events import Event, LeaveOrder, RaisedError
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


class FakeLink:
    """A connection whose pipe may have something."""

    lost = ""
    has_outgoing = False

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        self.looks = 0
        self.sent: list[Event] = []

    def fileno(self) -> int:
        return self.ours

    def receive(self) -> list[Event]:
        self.looks += 1
        os.set_blocking(self.ours, False)
        with contextlib.suppress(BlockingIOError):
            os.read(self.ours, 1)
        return []

    def send(self, event: Event) -> None:
        self.sent.append(event)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


def test_news_of_a_host_costs_no_look_at_the_others() -> None:
    links = [FakeLink() for _ in range(50)]
    group: Any = object.__new__(hosts_group.HostsWorkerGroup)
    with contextlib.ExitStack() as stack:
        group._selector = stack.enter_context(selectors.DefaultSelector())
        group._selecting, group._links, group._looked = threading.Lock(), links, math.inf
        group._link_of = dict(enumerate(links))
        for link in links:
            stack.callback(link.close)
            group._selector.register(link, selectors.EVENT_READ, link)
        os.write(links[7].theirs, b"x")
        assert group.receive(0.0) == []
        assert [number for number, link in enumerate(links) if link.looks] == [7]
        group.tell(LeaveOrder(rank=9, time=0.0))
        assert [number for number, link in enumerate(links) if link.sent] == [9]
        group._looked = -math.inf
        group.receive(0.0)
        assert all(link.looks for link in links), "now and then those that say nothing are looked at too"
