"""Files with the output of each process, where torchrun's `--tee` puts them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..events import Event, Lines, Phase, Stream
from ..notices import tell
from ..stream.logs import make_folder
from ..stream.sinks import Sink, join_lines
from .console import Tee


class TeeFiles(Sink):
    """Writes streams to `FOLDER/RUN_xxxx/attempt_0/LOCAL_RANK/stdout.log` and `stderr.log`.

    Args:
        folder: where the folder of the run is made.
        run_id: what its name begins with.
        tee: streams to write.

    Raises:
        LaunchError: the folder cannot be made.
    """

    def __init__(self, folder: str, run_id: str, tee: Tee) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=make_folder(folder)))
        self._tee = tee
        self._attempt = 0
        self._ranks: set[int] = set()
        self._files: dict[tuple[int, Stream], io.TextIOWrapper] = {}
        self._is_broken = False

    def show(self, events: Sequence[Event]) -> None:
        """Write the lines among the events."""
        try:
            for event in events:
                if isinstance(event, Lines) and not self._is_broken:
                    self._write(event)
                elif isinstance(event, Phase) and event.name == "starting" and event.rank >= 0:
                    self._ranks.add(event.rank)
                elif isinstance(event, Phase) and event.name == "restarting":
                    self._close_files()
                    self._attempt += 1
                    self._ranks.clear()
            for file in self._files.values():
                file.flush()
        except OSError as error:
            self._give_up(error)

    def note(self, text: str) -> None:
        """Leave it out: the files hold what the processes write."""

    def close(self) -> None:
        """Close the files."""
        try:
            self._close_files()
        except OSError as error:
            self._give_up(error)

    def _write(self, lines: Lines) -> None:
        local_rank = lines.rank - min(self._ranks, default=0)
        if not self._tee.has(local_rank, lines.stream):
            return
        key = (local_rank, lines.stream)
        if key not in self._files:
            path = self._folder / f"attempt_{self._attempt}" / str(local_rank) / f"{lines.stream}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[key] = open(path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - closed by close
        self._files[key].write(join_lines(lines.texts))

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _give_up(self, error: OSError) -> None:
        if not self._is_broken:
            self._is_broken = True
            text = f"the output in {self._folder} is not complete ({error}), the run goes on without it"
            tell(text, by="notebook-accel")
