"""What a detached run says: written in pieces, thinned where states replace each other, read while it grows."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_accel.events import (
    Event,
    Failure,
    Held,
    Lines,
    Metric,
    Notice,
    Phase,
    Progress,
    Pulse,
    Result,
    Unfinished,
)
from notebook_accel.launch.engines.detached import recording
from notebook_accel.launch.engines.detached.recording import Alive, Over, Reader, Recording, Snapshot, Writer
from tests.unit.clock import Clock


@pytest.fixture
def place(tmp_path: Path) -> Recording:
    return Recording(tmp_path)


def line(text: str, rank: int = 0) -> Lines:
    return Lines(rank=rank, time=1.0, stream="stdout", texts=(text,))


def bar(count: float, finished: bool = False) -> Progress:
    text = f"{count:g} of 9"
    return Progress(
        rank=0, time=1.0, bar=1, description="", count=count, total=9, text=text, finished=finished
    )


def read_all(reader: Reader) -> list[Event]:
    events: list[Event] = []
    while more := reader.read_events():
        events += more
    return events


def test_events_come_as_they_were_written(place: Recording) -> None:
    writer, reader = Writer(place, 0), Reader(recording=place)
    assert not reader.has_begun
    value = Result(rank=0, time=1.0, value=b"x" * (recording._READ_BYTES + 5), buffers=[b"12", b""])
    told: list[Event] = [
        line("a"),
        Metric(rank=0, time=1.0, values={"loss": 0.5}, step=1),
        value,
        line("b", 1),
    ]
    writer.write(told[:2])
    assert read_all(reader) == told[:2] and reader.has_begun
    writer.write([*told[2:], Held(rank=0, time=1.0, questions=3)])
    assert read_all(reader) == told[2:], "what is between launcher and rank is left out"
    over = Over(rank=-1, time=2.0, stopped=(1,), was_stopped=True)
    writer.close(over)
    assert read_all(reader) == [over]
    assert read_all(Reader(recording=place)) == [*told, over], "also by one who comes later"
    assert os.stat(place.find(0, 0)).st_mode & 0o777 == 0o600


def test_of_what_changes_the_newest_state_is_written_now_and_then(
    place: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    writer, reader = Writer(place, 0), Reader(recording=place)
    for count in range(100):
        writer.write([bar(count), Pulse(rank=0, time=1.0, steps=count, moment=5.0)])
    assert not read_all(reader)
    clock.now += 1.5
    writer.write([])
    assert read_all(reader) == [bar(99), Pulse(rank=0, time=1.0, steps=99)], "clocks of machines stay there"
    unfinished = Unfinished(rank=0, time=1.0, stream="stdout", text="half a")
    writer.write([bar(100), unfinished, line("half a line"), bar(9, finished=True)])
    clock.now += 20
    writer.write([])
    assert read_all(reader)[:2] == [line("half a line"), bar(9, finished=True)], (
        "they have taken their places"
    )
    clock.now += 36_000
    writer.write([bar(1)])
    clock.now += 9
    writer.write([bar(2)])
    written = read_all(reader)
    clock.now += 9
    writer.write([bar(3)])
    written += read_all(reader)
    assert written == [bar(1), bar(3)], "of a long run every ten seconds"


def test_a_job_that_has_nothing_to_say_says_that_it_can_write(
    place: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    writer, reader = Writer(place, 0), Reader(recording=place)
    for _ in range(61):
        writer.write([])
        clock.now += 0.5
    assert [type(event) for event in read_all(reader)] == [Alive] * 3


def test_a_job_that_starts_again_has_another_file(place: Recording) -> None:
    first, reader = Writer(place, 0), Reader(recording=place)
    first.write([line("a")])
    with open(place.find(0, 0), "ab") as file:
        file.write(b"\0\0")  # its machine was lost in the middle
    assert read_all(reader) == [line("a")]
    second = Writer(place, 1)
    again = Phase(rank=-1, time=2.0, name="restarting", detail="again")
    second.write([again, line("b")])
    assert read_all(reader) == [again, line("b")]
    assert read_all(Reader(recording=place)) == [line("a"), again, line("b")]


def test_a_start_that_told_nothing_is_passed_over(place: Recording) -> None:
    Writer(place, 0).write([line("a")])
    Writer(place, 2).write([line("c")])
    assert read_all(Reader(recording=place)) == [line("a"), line("c")]


class FullFile:
    """An error stream on a full disk."""

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    flush: Any = None


def test_a_full_disk_loses_nothing(place: Recording, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    writer, reader = Writer(place, 0), Reader(recording=place)
    real = os.write
    room = 10

    def write(file: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        writer.write([line("a")])
        writer.write([line("b")])
        assert not read_all(reader)
        other = Writer(place, 1)
        patch.setattr(sys, "stderr", FullFile())  # the job's own output goes to the same disk
        other.write([line("b")])
    assert capsys.readouterr().err.count("No space left on device") == 1
    writer.write([line("c")])
    assert read_all(reader) == [line("a"), line("b"), line("c")]


def test_the_end_waits_for_a_full_disk(place: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader, real, tries = Writer(place, 0), Reader(recording=place), os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(recording, "_SYNC_SECONDS", 0.001)
    writer.close(Over(rank=-1, time=2.0))
    assert read_all(reader) == [Over(rank=-1, time=2.0)]
    tries = -(10**9)
    monkeypatch.setattr(recording, "_LAST_SECONDS", 0.01)
    with pytest.raises(OSError, match="the end of the run could not be written"):
        Writer(place, 1).close(Over(rank=-1, time=2.0))


def test_clocks_and_processes_that_only_their_machine_knows_are_left_out(place: Recording) -> None:
    writer, reader = Writer(place, 0), Reader(recording=place)
    writer.write([Phase(rank=0, time=1.0, name="running", pid=5)])
    writer.write([Failure(rank=0, time=1.0, pid=5, exitcode=-9, moment=3.0, alive=2.0)])
    assert read_all(reader) == [
        Phase(rank=0, time=1.0, name="running"),
        Failure(rank=0, time=1.0, pid=5, exitcode=-9),
    ]


def test_of_much_the_first_and_the_last_is_kept(place: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("FIRST_BYTES", 2_000), ("LAST_BYTES", 4_000), ("_SEGMENT_BYTES", 1_000)):
        monkeypatch.setattr(recording, name, size)
    begun = Phase(rank=0, time=1.0, name="running")
    value = Result(rank=1, time=1.0, value=b"v" * 9_000)
    writer, slow = Writer(place, 0), Reader(recording=place)
    writer.write([begun, line("first"), value])
    assert read_all(slow) == [begun, line("first"), value]
    for number in range(200):
        writer.write([line(f"{number:03} " + "x" * 60)])
    assert sum(each.stat().st_size for each in place.folder.glob("events-*")) < 8_000
    over = Over(rank=-1, time=2.0)
    writer.close(over)
    told = read_all(Reader(recording=place))
    assert told[:3] == [begun, line("first"), value] and told[-1] == over
    numbers = [
        int(event.texts[0][:3]) for event in told if isinstance(event, Lines) and event.texts[0] != "first"
    ]
    (gap,) = [index for index in range(1, len(numbers)) if numbers[index] != numbers[index - 1] + 1]
    assert numbers[0] == 0 and numbers[-1] == 199 and 5 < gap < 100
    after = told[3 + gap :]
    assert isinstance(after[0], Notice) and "a part of what the run said is left out here" in after[0].text
    assert after[1:3] == [begun, value], "how things stood there"
    late = [event for event in read_all(slow) if not isinstance(event, Lines)]
    assert late == [*after[:3], over] and not any(isinstance(event, Snapshot) for event in told)


def test_what_does_not_fit_on_a_full_disk_is_counted(
    place: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MAX_WAITING", 1_000)
    monkeypatch.setattr(recording, "_SYNC_SECONDS", 0.001)
    writer, reader, real = Writer(place, 0), Reader(recording=place), os.write

    def refuse(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    result = Result(rank=0, time=1.0, value=b"v")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        patch.setattr(recording, "open", refuse, raising=False)
        for number in range(100):
            writer.write([line(f"{number}")])
        writer.write([result])
    assert len(writer._waiting) < 2_000
    writer.close(Over(rank=-1, time=2.0))
    told = read_all(reader)
    kept = [int(event.texts[0]) for event in told if isinstance(event, Lines)]
    assert kept == list(range(len(kept))) and 2 < len(kept) < 98
    (notice,) = [event for event in told if isinstance(event, Notice)]
    assert notice.text == f"{100 - len(kept)} lines are lost here: the disk was full"
    assert result in told and isinstance(told[-1], Over)
    assert real is os.write


def test_a_failure_of_an_attempt_that_is_over_is_not_written_late(
    place: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer, reader = Writer(place, 0), Reader(recording=place)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "open", refuse, raising=False)
        writer.write([Failure(rank=0, time=1.0, pid=5, exitcode=-9)])
    result = Result(rank=0, time=2.0, value=b"v")
    writer.write([Phase(rank=-1, time=2.0, name="restarting"), result])
    assert [event for event in read_all(reader) if isinstance(event, (Failure, Result))] == [result]


def test_the_end_in_a_word() -> None:
    over = Over(rank=-1, time=1.0)
    assert over.describe_status(has_failed_ranks=False) == "done"
    assert over.describe_status(has_failed_ranks=True) == "failed"
    asked = Over(rank=-1, time=1.0, was_asked=True)
    assert asked.describe_status(has_failed_ranks=False) == "stopped", "its ranks have returned"
    assert Over(rank=-1, time=1.0, hang="h").describe_status(has_failed_ranks=False) == "failed"
