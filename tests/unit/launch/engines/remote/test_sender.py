"""What a host sends of the files of a run, so that a copy of them reads like these at any time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from notebook_accel.events import Event, Lines, Result
from notebook_accel.launch.engines.detached.folder import Folder
from notebook_accel.launch.engines.detached.recording import Over, Reader, Recording, Writer
from notebook_accel.launch.engines.remote import sender as senders
from notebook_accel.launch.engines.remote.messages import Piece, Standing
from notebook_accel.launch.engines.remote.sender import Sender


@pytest.mark.parametrize("piece", [1000, 1 << 22])
def test_a_copy_reads_like_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(senders, "_PIECE_BYTES", piece)
    for name in ("there", "copy"):
        (tmp_path / name).mkdir(mode=0o700)
    folder, copy = Folder(tmp_path / "there"), Reader(recording=Recording(tmp_path / "copy"))
    folder.add_metadata(name="train", host="elsewhere")
    writer, sender = Writer(folder.recording, 0), Sender(folder)
    written: list[Event] = [
        Lines(rank=0, time=1.0, stream="stdout", texts=("a" * 3000, "b")),
        Result(rank=0, time=2.0, value=b"v" * 5000),
        Lines(rank=1, time=3.0, stream="stdout", texts=("c",)),
    ]
    read: list[Event] = []
    for number in range(len(written) + 1):
        if number < len(written):
            writer.write([written[number]])
        else:
            folder.note_end("done")
            writer.close(Over(rank=-1, time=4.0))
        is_complete = False
        while not is_complete:
            sent = sender.read()
            for event in sent:
                if isinstance(event, Piece):
                    with open(tmp_path / "copy" / event.name, "wb" if event.begins else "ab") as file:
                        file.write(event.data)
            is_complete = isinstance(sent[-1], Standing)
        while events := copy.read():
            read += events
    assert read == [*written, Over(rank=-1, time=4.0)]
    assert Folder(tmp_path / "copy").read_end() == folder.read_end()
    folder.ask_to_stop(5.0)
    assert [event.name for event in sender.read() if isinstance(event, Piece)] == ["stop-5.0"]
    (standing,) = sender.read()
    assert isinstance(standing, Standing) and standing.is_held, "it has just written"
    assert standing.time <= time.time()
