"""A run that a host drives, as a notebook sees it: its host reads the folder, and sends the events."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .... import interrupts
from ....errors import LaunchError, RunLeftError
from ....events import Event
from ..base import Outcome
from ..detached.folder import Folder
from ..detached.local import LocalWatch
from .client import Connector, Wanted
from .link import Link
from .messages import EndOrder, Standing, Watched, WatchOrder
from .pool import get_pool

_LOOK_SECONDS: Final = 0.1


class HostFolder(Folder):
    """The folder of a run on a host.

    Args:
        client: reaches the host.
        host: its name.
        python: the Python there; None finds one.
        run: number or name of the run; None is the one that was launched last.
    """

    def __init__(self, client: Connector, host: str, python: str | None, run: str | None) -> None:
        self.path = Path(f"{host}:")  # for messages
        self._client, self._host, self._python, self._run = client, host, python, run
        self._link: Link | None = None
        self._metadata: dict[str, Any] = {}
        self._files: Mapping[str, bytes] = {}
        self._events: list[Event] = []
        self._standing: Standing | None = None
        self._has_begun = False

    def open(self) -> None:
        """Let the host send the events from the first one on, until `close`.

        Raises:
            LaunchError: the host cannot be reached, or knows nothing of the run.
        """
        if self._link is not None:
            return
        self._events, self._standing, self._has_begun = [], None, False
        with interrupts.delay_interrupt():
            pool = get_pool()
            (self._link,) = pool.open(self._client, {self._host: self._python}, Wanted.here(), lambda: None)
        self._link.send(WatchOrder(rank=-1, time=time.time(), run=self._run))
        watched: Watched | None = None
        try:
            while watched is None:
                interrupts.obey_interrupt()
                self.wait(_LOOK_SECONDS)
                self._receive()
                watched = next((event for event in self._events if isinstance(event, Watched)), None)
            if watched.problem:
                raise LaunchError(f"host {self._host}: {watched.problem}")
        except BaseException:
            self.close()
            raise
        self._events.remove(watched)
        self._run, self.path = watched.number, Path(f"{self._host}:{watched.path}")
        self._metadata, self._files = dict(watched.metadata), watched.files

    def close(self) -> None:
        """Let the host send nothing more."""
        if self._link is not None:
            get_pool().put(self._link, is_clean=False)
            self._link = None

    def wait(self, seconds: float) -> None:
        """Wait until more of an event has come."""
        if self._link is not None:
            self._link.wait(seconds)

    def _receive(self) -> None:
        link = self._link
        assert link is not None
        self._events += link.receive()
        if link.lost and not self._events:
            raise LaunchError(f"host {self._host}: {link.lost}")

    def make_reader(self) -> HostFolder:
        """Return what reads the events: the folder itself."""
        return self

    def read_events(self) -> list[Event]:
        """Return the next events, none where there are no new ones; LaunchError where the connection has ended."""
        self._receive()
        found, self._events = self._events, []
        for event in found:
            if isinstance(event, Standing):
                self._standing = event
        events = [event for event in found if not isinstance(event, Standing)]
        self._has_begun |= bool(events)
        return events

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return self._has_begun

    @property
    def number(self) -> str:
        """The number of the run on its host."""
        return self._run or ""

    @property
    def title(self) -> str:
        """What it is called in sentences."""
        return f"run {self.number} on {self._host}"

    @property
    def attach_call(self) -> str:
        """What shows the run again in a notebook."""
        return f"notebook_accel.attach({self.number}, hosts={[self._host]!r})"

    def read_metadata(self) -> dict[str, Any]:
        """Return what anybody may know of the run."""
        return self._metadata

    def read(self, name: str) -> Any:
        """Return a value that was written."""
        return pickle.loads(self._files[name])

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

    def read_log(self) -> list[str]:
        """Return the last lines of what the driver's own process has written, once that has ended."""
        return [] if self._standing is None else [*self._standing.log]

    def read_stop(self) -> float | None:
        """Return the seconds that ranks have, where they are to stop; None where nobody asked."""
        return None if self._standing is None else self._standing.stop

    def ask_to_stop(self, grace: float) -> None:
        """Let the host ask the run to stop."""
        if self._link is not None:
            self._link.send(EndOrder(rank=-1, time=time.time(), grace=grace))


class HostWatch(LocalWatch):
    """Shows a run that a host drives."""

    def run(self) -> Outcome:
        """Return how the run has ended; one whose host is lost from sight is left."""
        try:
            return super().run()
        except LaunchError as error:
            self._control.leave()
            return Outcome(error=RunLeftError(f"{error}; {self._folder.describe_left()}"))
        finally:
            self._folder.close()
