"""Where the nodes of a run meet: handlers for torch elastic's agent, whose waits an interrupt ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from ....errors import LaunchError
from ....stream.record import RunRecord
from ...job import Rendezvous
from ..base import Outcome
from . import stores

OTHERS_START_AGAIN = "another node starts its workers again"
_LOOK_SECONDS = 0.05
_NOTICE_SECONDS = (3.0, 10.0, 30.0)
_LATER_SECONDS = 60.0
_JOIN_SECONDS = 900.0
_LAST_SECONDS = 5.0


class Patience:
    """A wait for other nodes: tells of itself now and then, and ends.

    Args:
        seconds: after which it ends with a LaunchError.
        who: waits.
        tell: takes a sentence.
        check: called at each look, ends the wait by an exception.
    """

    def __init__(
        self, seconds: float, who: str, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self._seconds = seconds
        self._who = who
        self._tell = tell
        self._check = check
        self._began = time.monotonic()
        self._told = 0

    @property
    def waited(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def was_told(self) -> bool:
        """Whether anybody heard of it."""
        return self._told > 0

    def look(self, whom: str) -> None:
        """Say for whom, where it is time to; LaunchError where it lasted too long."""
        self._check()
        if self.waited > self._seconds:
            raise LaunchError(
                f"{self._who} waited {self._seconds:g} s for {whom}; "
                "rdzv_conf={'join_timeout': seconds} sets how long"
            )
        later = _NOTICE_SECONDS[-1] + _LATER_SECONDS * (self._told - len(_NOTICE_SECONDS) + 1)
        due = _NOTICE_SECONDS[self._told] if self._told < len(_NOTICE_SECONDS) else later
        if self.waited >= due:
            self._told += 1
            self._tell(f"{self._who} waits for {whom}, for {self.waited:.0f} s now")


class OwnHandler(RendezvousHandler):
    """What our handlers have in common.

    Attributes:
        attempt: which start of the workers this is, counted from 0, alike on all nodes.
        check: called now and then during waits, which an exception of it ends.
        tell: takes sentences for the cell.
        interface: the network interface by which this node reaches the others, None where nobody knows.
        is_called_off: whether something happened on another node that ends the run.
        seconds_to_tell: how long ranks of other nodes are given, where nothing goes on, to say where they are.
        seconds_to_notice: how long it takes at most until a lost node is noticed, 0 where none may be lost.
    """

    use_agent_store = True
    attempt = -1
    seconds_to_notice = 0.0
    seconds_to_tell = 0.0
    is_called_off = False

    def __init__(self, place: Rendezvous) -> None:
        self._place = place
        self.check: Callable[[], None] = lambda: None
        self.tell: Callable[[str], None] = lambda text: None
        self.interface: str | None = None

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._place.run_id

    def shutdown(self) -> bool:
        return True

    def wait_for_others(self) -> None:
        """Wait, after the workers of this node have ended well, for as long as other nodes need this one."""

    def all_have_ended(self) -> bool:
        """Say that this node's workers have ended well; return False where they may have to start again for others."""
        return True

    def changed_within(self, seconds: float) -> bool:
        """Wait for a reason outside this node why its workers lost a peer; return whether there is one."""
        return False

    def why_again(self, ranks: int) -> str:
        """Say why workers start again although none failed here; `ranks` is the new world size."""
        return OTHERS_START_AGAIN

    def share_news(self, news: float, *, ask: bool, every: float) -> tuple[float, bool]:
        """Tell other nodes that something was heard of ranks here, or that these are asked where they are.

        Args:
            news: when something was heard last, by the monotonic clock.
            ask: whether they are asked.
            every: seconds in which it is told once at most.

        Returns:
            When something was heard of ranks of other nodes, and whether other nodes ask theirs since the last call.
        """
        return 0.0, False

    def concluded(self, attempted: Callable[[], Outcome], record: RunRecord) -> Outcome:
        """Run this node's part, and return how the run ended: alike on all nodes."""
        return attempted()

    def shortage(self) -> str:
        """Say that too few nodes are left, empty where they are enough."""
        return ""


class SingleNode(OwnHandler):
    """The rendezvous of a run on one node: a store on a free port, at once.

    Torch's own backends take a tenth of a second to agree with nobody.
    """

    def get_backend(self) -> str:
        return "single-node"

    def next_rendezvous(self) -> RendezvousInfo:
        self.attempt += 1
        store = stores.opened(self._place)  # a new one for each attempt: the last one's holds its addresses
        where = RendezvousStoreInfo(master_addr=self._place.address, master_port=store.port)
        return RendezvousInfo(store, 0, 1, where)


class PatientNodes(OwnHandler):
    """The rendezvous, for torch elastic's own agents, of nodes whose ranks are given: node 0 holds the store.

    A node that has to start its workers again calls the others, which do the same. Agents meet once more at torch's
    exit barrier: node 0 stays until the others have left it, else they would warn of a lost connection.
    """

    def __init__(self, place: Rendezvous) -> None:
        super().__init__(place)
        host, _, port = place.endpoint.rpartition(":") if place.endpoint else (place.address, "", place.port)
        self._host = str(host).strip("[]")
        self._port = int(port or 0)
        self._seconds = join_seconds(place.settings or {})
        self._store: TCPStore | None = None
        self._prefix = f"nodes of {place.run_id}/"

    def get_backend(self) -> str:
        return "patient-nodes"  # torch elastic has another one that is called static

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes; LaunchError where one does not come in time or has left."""
        self.attempt += 1
        deadline = time.monotonic() + self._seconds
        if self._store is None:
            self._store = self._connect(deadline)
        where = RendezvousStoreInfo(master_addr=self._host, master_port=self._port)
        try:
            self._store.set(self._key("called"), "")
            self._store.set(self._key(f"node {self._place.node_rank}"), "")
            self._wait_for_all(self._store, deadline)
            if self._place.node_rank == 0:
                self._forget_workers(self._store)
                self._store.set(self._key("clean"), "")
            self._store.wait([self._key("clean")])
        except DistError as error:
            raise LaunchError(f"node 0, which holds the store of the run, has left: {error}") from None
        store = PrefixStore(self._key("agents"), self._store)
        return RendezvousInfo(store, self._place.node_rank, self._place.num_nodes, where)

    def _wait_for_all(self, store: TCPStore, deadline: float) -> None:
        nodes = range(self._place.num_nodes)
        while missing := [node for node in nodes if not store.check([self._key(f"node {node}")])]:
            self._check_left(missing)
            self._check_time(deadline, "for " + ", ".join(f"node {node}" for node in missing))
            time.sleep(_LOOK_SECONDS)

    def _forget_workers(self, store: TCPStore) -> None:
        """Remove what ended workers wrote: new ones would take their addresses for each other's."""
        if self.attempt == 0:
            return
        if not hasattr(store, "list_keys"):
            raise LaunchError("workers on several nodes can only start again with a newer torch")
        for key in store.list_keys():
            if not key.startswith(self._prefix):
                store.delete_key(key)

    def num_nodes_waiting(self) -> int:
        """Return 1 where another node calls for the next attempt."""
        assert self._store is not None
        try:
            return int(self._store.check([self._key("called", self.attempt + 1)]))
        except DistError:
            return 0  # node 0 has left: what becomes of the workers tells

    def shutdown(self) -> bool:
        """Tell the others that this node has ended, and close its hold on the store; node 0 waits for them first."""
        if self._store is not None and self._place.node_rank == 0:
            deadline = time.monotonic() + _LAST_SECONDS
            others = [self._left(node) for node in range(1, self._place.num_nodes)]
            while not all(self._store.check([key]) for key in others) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        if self._store is not None:
            try:
                self._store.set(self._left(self._place.node_rank), "")
            except DistError:
                return False  # node 0 was first
            finally:
                self._store = None
        return True

    def _connect(self, deadline: float) -> TCPStore:
        is_host = self._place.node_rank == 0
        timeout = timedelta(seconds=stores.CONNECT_SECONDS)
        while True:
            try:
                if is_host:
                    store = TCPStore(
                        self._host, self._port, is_master=True, timeout=timeout, wait_for_workers=False
                    )
                else:
                    store = stores.found(self._host, self._port, self.check)
                store.set_timeout(timedelta(seconds=self._seconds))
                return store
            except (DistError, OSError) as error:
                if is_host:
                    raise LaunchError(f"cannot open a store at {self._host}:{self._port}: {error}") from None
            self._check_time(deadline, f"for node 0 at {self._host}:{self._port}")
            time.sleep(_LOOK_SECONDS)

    def _check_time(self, deadline: float, whom: str) -> None:
        self.check()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node {self._place.node_rank} of {self._place.num_nodes} waited {self._seconds:g} s {whom}; "
                "rdzv_conf={'join_timeout': seconds} sets how long"
            )

    def _check_left(self, missing: list[int]) -> None:
        assert self._store is not None
        left = [node for node in missing if self._store.check([self._left(node)])]
        if left:
            names = ", ".join(f"node {node}" for node in left)
            raise LaunchError(f"{names} has left the run: its own notebook or terminal says why")

    def _key(self, name: str, attempt: int | None = None) -> str:
        return f"{self._prefix}attempt {self.attempt if attempt is None else attempt}/{name}"

    def _left(self, node: int) -> str:
        return f"{self._prefix}left/node {node}"


def join_seconds(settings: Mapping[str, Any]) -> float:
    """Return how long a node waits for the others, by `rdzv_conf`."""
    return float(settings.get("join_timeout", settings.get("timeout", _JOIN_SECONDS)))
