"""Where the nodes of a run meet: handlers for torch elastic's agent, whose waits an interrupt ends."""

from __future__ import annotations

import socket
import sys
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

from ...errors import LaunchError
from ..addresses import listen
from ..job import Rendezvous

OTHERS_START_AGAIN = "another node starts its workers again"
_LOOK_SECONDS = 0.05
_CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 1.0
_JOIN_SECONDS = 900.0
_LAST_SECONDS = 5.0


def handler_for(place: Rendezvous) -> OwnHandler:
    """Return how a node meets others that come and go, or nobody; a fixed number of nodes meets by `nodes.Nodes`."""
    if place.num_nodes == 1 and not place.endpoint:
        return SingleNode(place)
    from .elastic_nodes import ElasticNodes  # which needs this module

    assert place.is_elastic
    return ElasticNodes(place)


class OwnHandler(RendezvousHandler):
    """What our handlers have in common.

    Attributes:
        attempt: which start of the workers this is, counted from 0, alike on all nodes.
        check: called now and then during waits, which an exception of it ends.
        seconds_to_notice: how long it takes at most until a lost node is noticed, 0 where none may be lost.
    """

    use_agent_store = True
    attempt = -1
    seconds_to_notice = 0.0

    def __init__(self, place: Rendezvous) -> None:
        self._place = place
        self.check: Callable[[], None] = lambda: None

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
        store = open_store(self._place)  # a new one for each attempt: the last one's holds its addresses
        where = RendezvousStoreInfo(master_addr=self._place.address, master_port=store.port)
        return RendezvousInfo(store, 0, 1, where)


class StaticNodes(OwnHandler):
    """The rendezvous of nodes whose ranks are given: node 0 holds the store, all meet there for each attempt.

    A node that has to start its workers again calls the others, which do the same.
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
        return "static"

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

    def wait_for_others(self) -> None:
        """Keep the store open, on the node that holds it, until the others have ended."""
        assert self._store is not None
        if self._place.node_rank != 0:
            return
        others = range(1, self._place.num_nodes)
        while not all(self._store.check([self._left(node)]) for node in others):
            if self.num_nodes_waiting():
                raise LaunchError("another node starts its workers again, this node's have ended well")
            self.check()
            time.sleep(_LOOK_SECONDS)

    def shutdown(self) -> bool:
        """Tell the others that this node has ended, and close its hold on the store."""
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
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        while True:
            try:
                if not is_host:  # torch's store complains in the terminal where nobody listens yet
                    socket.create_connection((self._host, self._port), _PROBE_SECONDS).close()
                store = TCPStore(
                    self._host, self._port, is_master=is_host, timeout=timeout, wait_for_workers=False
                )
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


class PatientNodes(StaticNodes):
    """Nodes whose agents meet once more at torch elastic's exit barrier: node 0 stays until the others have left it.

    Otherwise those that still ask its store whether all are there warn of a lost connection.
    """

    def get_backend(self) -> str:
        return "patient-nodes"  # torch elastic has another one that is called static

    def shutdown(self) -> bool:
        if self._store is not None and self._place.node_rank == 0:
            deadline = time.monotonic() + _LAST_SECONDS
            others = [self._left(node) for node in range(1, self._place.num_nodes)]
            while not all(self._store.check([key]) for key in others) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        return super().shutdown()


def join_seconds(settings: Mapping[str, Any]) -> float:
    """Return how long a node waits for the others, by `rdzv_conf`."""
    return float(settings.get("join_timeout", settings.get("timeout", _JOIN_SECONDS)))


def open_store(place: Rendezvous) -> TCPStore:
    """Open a store that listens at the run's own address alone.

    Left to itself torch's listens at all addresses, in IPv6; the name of each peer is then looked up as IPv6 too,
    which no hosts file answers, and a name server that is slow or away delays everything.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    try:
        if sys.platform == "win32":
            return TCPStore(place.address, int(place.port or 0), use_libuv=False, **options)
        listening = listen(place.address, int(place.port or 0))
        port = listening.getsockname()[1]
        return TCPStore(place.address, port, master_listen_fd=listening.detach(), **options)
    except (RuntimeError, OSError) as error:
        raise LaunchError(f"cannot open a store at {place.address}:{place.port}: {error}") from None
