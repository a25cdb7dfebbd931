"""A run that a host drives: its files are copied here while they grow, and read as those of any other run."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Final

from .... import interrupts, owners
from ....errors import LaunchError, RunLeftError
from ....stream.readable import wait_readable
from ...leftovers import PREFIX, remove_abandoned
from ..base import Outcome
from ..detached.folder import CELLS, Folder
from ..detached.local import LocalWatch
from .client import Connector, Wanted
from .link import Link
from .messages import EndOrder, Piece, Standing, Watched, WatchOrder
from .pool import get_pool

_LOOK_SECONDS: Final = 0.1


class MirrorFolder(Folder):
    """The folder of a run on a host, copied here while it is watched.

    Args:
        client: reaches the host.
        host: its name.
        python: the Python there; None finds one.
        run: number or name of the run; None is the one that was launched last.
    """

    def __init__(self, client: Connector, host: str, python: str | None, run: str | None) -> None:
        remove_abandoned()
        super().__init__(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owners.describe_own()}-")))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._client, self._host, self._python, self._run = client, host, python, run
        self._metadata: dict[str, Any] = {}
        self._link: Link | None = None
        self._standing: Standing | None = None

    def connect(self) -> None:
        """Let the host send what it has, until `disconnect`.

        Raises:
            LaunchError: the host cannot be reached, or knows nothing of the run.
        """
        if self._link is not None:
            return
        self.path.mkdir(mode=0o700, exist_ok=True)
        with interrupts.delay_interrupt():
            pool = get_pool()
            (self._link,) = pool.open(self._client, {self._host: self._python}, Wanted.here(), lambda: None)
        self._link.send(WatchOrder(rank=-1, time=time.time(), run=self._run))
        try:
            while not (self.path / CELLS).exists():
                wait_readable(self._link.fileno(), _LOOK_SECONDS)
                interrupts.obey_interrupt()
                self.fetch()
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        """Let the host send nothing more, and remove what has come."""
        if self._link is not None:
            get_pool().put(self._link, is_clean=False)
            self._link = None
        self.remove()

    def fetch(self) -> None:
        """Write what has come.

        Raises:
            LaunchError: the connection has ended, or the host knows nothing of the run.
        """
        link = self._link
        assert link is not None
        for event in link.receive():
            if isinstance(event, Watched):
                if event.problem:
                    raise LaunchError(f"host {self._host}: {event.problem}")
                self._run = event.number
            elif isinstance(event, Piece):
                with open(self.path / event.name, "wb" if event.begins else "ab") as file:
                    file.write(event.data)
            elif isinstance(event, Standing):
                self._standing = event
        if link.lost:
            raise LaunchError(f"host {self._host}: {link.lost}")

    @property
    def number(self) -> str:
        """The number of the run on its host."""
        return self._run or ""

    def read_metadata(self) -> dict[str, Any]:
        """Return what anybody may know of the run; also where it is watched no more."""
        self._metadata = super().read_metadata() or self._metadata
        return self._metadata

    @property
    def title(self) -> str:
        """What it is called in sentences."""
        return f"run {self.number} on {self._host}"

    @property
    def attach_call(self) -> str:
        """What shows the run again in a notebook."""
        return f"notebook_accel.attach({self.number}, hosts={[self._host]!r})"

    @property
    def is_held(self) -> bool:
        """Whether the process lives that drives the run."""
        return self._standing is None or self._standing.is_held

    @property
    def is_local(self) -> bool:
        """Whether all is known of it here: its host says it."""
        return True

    @property
    def has_restarted(self) -> bool:
        """Whether the host was started again since the launch."""
        return self._standing is not None and self._standing.has_restarted

    def ask_to_stop(self, grace: float) -> None:
        """Let the host ask the run to stop."""
        if self._link is not None:
            self._link.send(EndOrder(rank=-1, time=time.time(), grace=grace))


class HostWatch(LocalWatch):
    """Shows a run that a host drives."""

    _folder: MirrorFolder

    def run(self) -> Outcome:
        """Return how the run has ended; one whose host is lost from sight is left."""
        try:
            return super().run()
        except LaunchError as error:
            self._control.leave()
            return Outcome(error=RunLeftError(f"{error}; {self._folder.describe_left()}"))
        finally:
            self._folder.disconnect()

    def begin(self) -> None:
        """Let the host send its files."""
        self._folder.connect()

    def pass_on(self) -> bool:
        """Copy and show what the run has said next."""
        self._folder.fetch()
        return super().pass_on()
