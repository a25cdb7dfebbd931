"""How nodes meet: handlers for torch elastic's agent, whose waits an interrupt ends."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler

from ....errors import LaunchError
from ....stream.record import RunRecord
from ...job import Rendezvous
from ...supervise.stop_agreement import Questions
from ...transfer import failures
from ..base import Outcome
from .outcomes import RestartCause

OTHERS_START_AGAIN = "another node starts its workers again"
_NOTICE_SECONDS = (3.0, 10.0, 30.0)
_LATER_SECONDS = 60.0
_JOIN_SECONDS = 900.0


class PeerWait:
    """A wait for other nodes: it is reported now and then, and ends.

    Args:
        seconds: how long it lasts at most; then it ends with a LaunchError.
        who: the name of the one that waits.
        tell: takes a sentence for the cell.
        check: called at each look; its exception ends the wait.
    """

    def __init__(
        self, seconds: float, who: str, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self._seconds = seconds
        self._who = who
        self._tell = tell
        self._check = check
        self._began = time.monotonic()
        self._num_reports = 0

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def is_reported(self) -> bool:
        """Whether the cell has shown it."""
        return self._num_reports > 0

    def look(self, whom: str) -> None:
        """Report the wait where that is due; comes several times a second.

        Args:
            whom: the name of those who are waited for.

        Raises:
            LaunchError: it has lasted too long.
        """
        self._check()
        if self.waited > self._seconds:
            raise LaunchError(
                f"{self._who} waited {self._seconds:g} s for {whom}; "
                "rdzv_conf={'join_timeout': seconds} sets how long"
            )
        later = _NOTICE_SECONDS[-1] + _LATER_SECONDS * (self._num_reports - len(_NOTICE_SECONDS) + 1)
        due = _NOTICE_SECONDS[self._num_reports] if self._num_reports < len(_NOTICE_SECONDS) else later
        if self.waited >= due:
            self._num_reports += 1
            self._tell(f"{self._who} waits for {whom}, for {self.waited:.0f} s now")


@dataclass
class StopState:
    """How a stop of an attempt stands.

    Attributes:
        is_asked: whether a node asks for it.
        is_held: whether the others know the questions of the ranks here.
        questions: of the ranks of all nodes, None before all are held.
    """

    is_asked: bool = False
    is_held: bool = False
    questions: Questions | None = None


class NodeRendezvous(RendezvousHandler):
    """What the ways to meet have in common; most methods do nothing unless a subclass needs them.

    Attributes:
        attempt: which start of the workers this is, counted from 0, alike on all nodes.
        check: called now and then during waits; its exception ends the wait.
        tell: takes sentences for the cell.
        interface: the network interface by which this node reaches the others, None where nobody knows.
        num_missed: how often the workers of this run had started again before this node came.
        is_called_off: whether something happened on another node that ends the run.
        seconds_to_tell: how long ranks of other nodes have, in a hang, to say where they are.
        seconds_to_notice: how long it takes at most until a lost node is noticed; 0 where none may be lost.
    """

    use_agent_store = True
    attempt = -1
    seconds_to_notice = 0.0
    seconds_to_tell = 0.0
    is_called_off = False
    num_missed = 0

    def __init__(self, place: Rendezvous) -> None:
        self._place = place
        self.check: Callable[[], None] = lambda: None
        self.tell: Callable[[str], None] = lambda text: None
        self.interface: str | None = None

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self._place.run_id

    def wait_for_others(self) -> None:
        """Wait as long as other nodes need this one, after its workers have ended well."""

    def finish_attempt(self) -> bool:
        """Say that this node's workers have ended well; return whether those of all nodes have.

        While others run, one of them may fail, and then all workers start again.
        """
        return True

    def wait_for_change(self, seconds: float) -> bool:
        """Wait for news of a lost or restarting node, which would explain why workers here lost a peer.

        Args:
            seconds: how long to wait.

        Returns:
            Whether there was such news.
        """
        return False

    def explain_restart(self, world_size: int) -> str:
        """Return why workers start again because of other nodes; empty where these said nothing.

        Args:
            world_size: the new number of ranks.
        """
        return ""

    def share_cause(self, cause: RestartCause) -> None:
        """Tell other nodes why the workers of this node start again; comes before it meets them again.

        Args:
            cause: what happened here.
        """

    def share_news(self, news: float, *, ask: bool, every: float) -> tuple[float, bool]:
        """Exchange with other nodes whether anything was heard of ranks.

        Args:
            news: when something was heard last of ranks here, by the monotonic clock.
            ask: whether the ranks here are being asked where they are.
            every: seconds between two messages about news.

        Returns:
            When something was heard last of ranks elsewhere, by this node's monotonic clock; and whether another node
            has begun to ask its ranks since the last call.
        """
        return 0.0, False

    def share_hang(self, report: str) -> bool:
        """Tell other nodes where the ranks of this node hang; return whether all have told it.

        Args:
            report: the hang's.
        """
        return False

    @abstractmethod
    def make_host_error(self, error: BaseException) -> LaunchError:
        """Return the error of a launch whose store is gone, with the name of the node that held it.

        Args:
            error: what a call of the store raised.
        """

    @abstractmethod
    def share_stop(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        """Exchange with other nodes how a stop of the run stands; see `ShareStop`."""

    @abstractmethod
    def conclude(self, run_workers: Callable[[], Outcome], record: RunRecord) -> Outcome:
        """Run this node's part, and agree with the other nodes on how the run ended.

        Args:
            run_workers: runs this node's workers to their end, and returns how they ended.
            record: has the results of this node's ranks.

        Returns:
            How the run ended, alike on all nodes.
        """

    def describe_shortage(self) -> str:
        """Return that nodes are gone and have to come back, empty where enough are left."""
        return ""


def describe_lost_host(name: str, address: str) -> str:
    """Return that the node is gone without which the run cannot go on, and what to do.

    Args:
        name: the node's number and host.
        address: where the nodes meet.
    """
    return (
        f"{name} at {address}, which holds the run together, is gone: its run was stopped, its kernel has ended, "
        "or it is cut off the network; run the cell again on all nodes"
    )


def name_lost_host(name: str, address: str, error: BaseException) -> LaunchError:
    """Return the error of a launch that has lost the node that holds the store.

    Args:
        name: the node's number and host.
        address: where the nodes meet.
        error: what torch raised; its first line becomes a note.
    """
    lost = LaunchError(describe_lost_host(name, address))
    failures.add_note(lost, f"torch says: {str(error).partition(chr(10))[0]}")
    return lost


def read_join_seconds(settings: Mapping[str, Any]) -> float:
    """Return how many seconds a node waits for the others.

    Args:
        settings: the launch's `rdzv_conf`.
    """
    return float(settings.get("join_timeout", settings.get("timeout", _JOIN_SECONDS)))
