"""Several nodes, a fixed number of them: they meet, look whether they fit together, and end with one cause or value."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from ....errors import LaunchError
from ....events import Result
from ....stream.record import RunRecord
from ... import addresses, failures
from ...control import StopAsked
from ...culprit import unpack_value
from ...job import Job
from ..base import Outcome
from . import ends, frames, stores
from .cards import Card, card_of
from .ends import End
from .frames import Message, Spoke
from .hub import Hub, Met
from .rendezvous import OwnHandler, Patience, join_seconds

_PREFIX: Final = "notebook_accel nodes/"
_LOOK_SECONDS: Final = 0.05
_SOON_SECONDS: Final = 2.0  # in which a node that waits looks more often
_PEER_SECONDS: Final = 3.0  # in which a node 0 looks for another one at an address that is not its own
_NAMED: Final = 8  # nodes that a message names
_VERDICT_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 30.0


class Nodes(OwnHandler):
    """The rendezvous of a fixed number of nodes, by their given ranks (`static`) or as they come (`c10d`).

    One of them holds torch's store, at the address that all know, and the hub, whose port is in the store.

    Attributes:
        is_called_off: whether something happened on another node that ends the run.
    """

    seconds_to_tell = 2.0

    def __init__(self, job: Job) -> None:
        super().__init__(job.rendezvous)
        place = job.rendezvous
        host, _, port = place.endpoint.rpartition(":") if place.endpoint else (place.address, "", place.port)
        self._host, self._port = str(host).strip("[]"), int(port or 0)
        self._wants_first = job.returns == "first"
        self._card = card_of(job)
        self._seconds = join_seconds(place.settings or {})
        self._elects = place.backend != "static"
        self._store: TCPStore | None = None
        self._hub: Hub | None = None
        self._spoke: Spoke | None = None
        self._met: Met | None = None
        self._called = -1
        self._verdict: Message | None = None
        self._value: Message | None = None
        self._asked_to_stop: float | None = None
        self._news_told = self._news_heard = 0.0
        self._has_asked = self._is_asked = False
        self.is_called_off = False

    def get_backend(self) -> str:
        return "nodes"

    # -- meeting

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes; LaunchError where one does not come in time, has left or does not fit."""
        self.attempt += 1
        who = f"node {self._place.node_rank} of {self._place.num_nodes}"
        patience = Patience(self._seconds, who, self.tell, self.check)
        if self._spoke is None:
            self._spoke = self._opened(patience)
        if self.attempt and self._hub is not None and not hasattr(self._store, "list_keys"):
            raise LaunchError("workers on several nodes can only start again with a newer torch")
        self._met = met = self._wait_for_all(patience)
        self._is_asked = False  # where workers of the last attempt were
        if patience.was_told:
            self.tell(f"all {self._place.num_nodes} nodes are there, after {patience.waited:.0f} s")
        others = [address for rank, address in enumerate(met.addresses) if rank != met.node_rank]
        if others:
            towards = others[0] if met.node_rank == met.host_rank else self._spoke.peer
            self.interface = addresses.interface_towards(towards)
        assert self._store is not None
        store = PrefixStore(f"{_PREFIX}attempt {self.attempt}/agents", self._store)
        where = RendezvousStoreInfo(master_addr=self._host, master_port=self._port)
        return RendezvousInfo(store, met.node_rank, self._place.num_nodes, where)

    def _wait_for_all(self, patience: Patience) -> Met:
        """Return who is there, once all are."""
        here: Sequence[Card] = [self._card]
        self._say_card()
        while True:
            assert self._spoke is not None
            message = self._spoke.hear(_LOOK_SECONDS)
            if message is None and not self._spoke.lost:
                patience.look(self._missing(here))
            elif message is None or message.kind == "over":
                if self.attempt or self._hub is not None:
                    raise LaunchError(f"{self._host_name()} has left: its own notebook or terminal says why")
                self._go_again(patience)
            elif message.kind == "here":
                here = message.value
            elif message.kind == "met":
                return _met_of(message)
            elif message.kind == "refused":
                raise LaunchError(str(message.value))
            else:
                self._note(message)
                if self._verdict is not None:
                    raise LaunchError(f"the workers cannot start again: {ends.spoken(self._verdict.value)}")

    def _say_card(self) -> None:
        assert self._spoke is not None
        self._spoke.say(Message("card", (self._card, self.attempt, self._hub is not None)))

    def _go_again(self, patience: Patience) -> None:
        """Wait for the next run at the same place: the one that was there ends just now."""
        assert self._spoke is not None
        self._spoke.say(Message("bye"))
        self._spoke.close()
        self._spoke = self._store = None
        time.sleep(_LOOK_SECONDS)
        self._spoke = self._connected(patience)
        self._say_card()

    def _missing(self, here: Sequence[Card]) -> str:
        count, ranks = self._place.num_nodes, {card.node_rank for card in here}
        if self._elects and self._met is None:
            more = count - len(here)
            there = ", ".join(sorted(card.host for card in here))
            return f"{more} more {'node' if more == 1 else 'nodes'} ({len(here)} of {count} there: {there})"
        missing = (node for node in range(count) if node not in ranks)
        named = [self._with_ranks(node) for node in itertools.islice(missing, _NAMED)]
        more = count - len(ranks) - len(named)
        return ", ".join([*named, *([f"{more} more nodes"] if more else [])])

    def _with_ranks(self, node: int) -> str:
        each = self._card.processes
        first, last = node * each, node * each + each - 1
        return f"node {node} ({f'rank {first}' if each == 1 else f'ranks {first} to {last}'})"

    def _opened(self, patience: Patience) -> Spoke:
        """Hold the store or go to it.

        A node 0 whose address is another machine's first looks whether a node 0 is there: one of them is wrong.
        """
        is_first = self._place.node_rank == 0
        is_here = not addresses.unusable(self._host, 0)
        if not self._elects and is_first and not is_here:
            try:
                return self._connected(Patience(_PEER_SECONDS, "node 0", self.tell, self.check))
            except LaunchError:
                is_here = True  # an address that leads here from outside, perhaps
        may_host = is_first and is_here
        settings = self._place.settings or {}
        if self._elects and "is_host" in settings:
            may_host = str(settings["is_host"]).lower() in ("true", "1", "t", "yes", "y")
        if may_host and (spoke := self._hosted()) is not None:
            return spoke
        return self._connected(patience)

    def _hosted(self) -> Spoke | None:
        """Open store and hub; None where another node of this machine was first and that is as well."""
        timeout = timedelta(seconds=stores.CONNECT_SECONDS)
        try:
            if addresses.unusable(self._host, 0) and not addresses.leads_here(self._host, self._port):
                raise LaunchError(
                    f"node 0 cannot open a store at {self._host}:{self._port}: "
                    "that is no address of this machine; master_addr is the address of node 0"
                )
            store = TCPStore(self._host, self._port, is_master=True, timeout=timeout, wait_for_workers=False)
        except (DistError, OSError) as error:
            if self._elects and addresses.unusable("", self._port):
                return None
            reason = str(error).partition("\n")[0]
            raise LaunchError(f"node 0 cannot open a store at {self._host}:{self._port}: {reason}") from None
        store.set_timeout(timedelta(seconds=self._seconds))
        token = secrets.token_bytes(frames.TOKEN_BYTES)
        listening = addresses.listen_to_others(self._host)
        self._store, port = store, listening.getsockname()[1]
        self._hub = Hub(
            listening,
            token,
            self._place.num_nodes,
            elects=self._elects,
            before_again=self._forget_workers,
        )
        own = self._host if addresses.is_loopback(self._host) else "127.0.0.1"
        spoke = Spoke(own, port, token, stores.CONNECT_SECONDS)
        store.set(f"{_PREFIX}hub", f"{port} {token.hex()}")
        return spoke

    def _connected(self, patience: Patience) -> Spoke:
        whom, hint = self._host_name(), ""
        if not self._elects and addresses.is_loopback(self._host):
            hint = f"; {self._host} is this machine itself, master_addr is the address of node 0"
        while True:
            try:
                if (spoke := self._greeted()) is not None:
                    return spoke
                reason = "it is no run's store, or no node 0 of this version"
            except (DistError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            patience.look(f"{whom} ({reason}{hint})")
            time.sleep(_LOOK_SECONDS if patience.waited > _SOON_SECONDS else _LOOK_SECONDS / 10)

    def _greeted(self) -> Spoke | None:
        """Read where the hub is, and go there; None where the store does not say so."""
        store = stores.found(self._host, self._port, self.check)
        deadline = time.monotonic() + stores.PROBE_SECONDS
        while not store.check([f"{_PREFIX}hub"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS / 10)
        port, token = store.get(f"{_PREFIX}hub").decode().split()
        spoke = Spoke(self._host, int(port), bytes.fromhex(token), stores.CONNECT_SECONDS)
        store.set_timeout(timedelta(seconds=self._seconds))
        self._store = store
        return spoke

    def _forget_workers(self) -> None:
        """Remove what ended workers wrote: new ones would take their addresses for each other's."""
        assert self._store is not None
        for key in self._store.list_keys():
            if not key.startswith(_PREFIX):
                self._store.delete_key(key)

    def _host_name(self) -> str:
        if self._met is not None:
            return self._met.cards[self._met.host_rank].name
        return f"{'the node' if self._elects else 'node 0'} at {self._host}:{self._port}"

    # -- while workers run

    def num_nodes_waiting(self) -> int:
        """Return 1 where another node calls for the next attempt; note what else the others say."""
        while self._spoke is not None and (message := self._spoke.hear(0)) is not None:
            self._note(message)
        if self._spoke is not None and self._spoke.lost:
            self.is_called_off = True
        return int(self._called > self.attempt and not self.is_called_off)

    def _note(self, message: Message) -> None:
        if message.kind == "again":
            self._called = max(self._called, int(message.value))
        elif message.kind == "trouble":
            self.is_called_off = True
        elif message.kind == "verdict":
            self._verdict = message
            self.is_called_off = self.is_called_off or message.value is not None
        elif message.kind == "value":
            self._value = message
        elif message.kind == "news":
            self._news_heard = time.monotonic()
        elif message.kind == "ask":
            self._is_asked = True

    def share_news(self, news: float, *, ask: bool, every: float) -> tuple[float, bool]:
        self.num_nodes_waiting()  # takes what the others said
        assert self._spoke is not None
        if ask and not self._has_asked:
            self._spoke.say(Message("ask"))
        self._has_asked = ask
        now = time.monotonic()
        if news > self._news_told and now - self._news_told > every:
            self._news_told = now
            self._spoke.say(Message("news"))
        is_asked, self._is_asked = self._is_asked, False
        return self._news_heard, is_asked

    # -- ending

    def concluded(self, attempted: Callable[[], Outcome], record: RunRecord) -> Outcome:
        """Run this node's part, and return how the run ended: alike on all nodes."""
        try:
            outcome = attempted()
        except BaseException as error:
            card = self._own_card()
            if isinstance(error, (KeyboardInterrupt, StopAsked)):
                self._say_end(End(card=card, kind="stopped", text=f"{card.name} was stopped"))
            else:
                self._say_end(
                    End(card=card, kind="failed", text=f"{card.name} failed: {failures.title(error)}")
                )
            raise
        card = self._own_card()
        end = ends.end_of(outcome, card, is_complete=len(record.results) >= card.processes)
        if self._met is None or self._spoke is None:
            self._say_end(end)  # it was stopped while others waited as well
            return outcome
        if end.kind == "done" and self._wants_first and 0 in record.results:
            result = record.results[0]
            self._spoke.say(Message("value", result.time, [result.value, *result.buffers]))
        self._say_end(end)
        try:
            cause = self._wait_for_verdict(is_well=end.kind == "done")
        except StopAsked:
            self._say_end(End(card=card, kind="stopped", text=f"{card.name} was stopped"))
            return Outcome(stopped=outcome.stopped, was_stopped=True)
        if cause is None and end.kind == "done":
            return self._with_value(outcome)
        if cause is None or (cause.card.node_rank == end.card.node_rank and not cause.hang):
            return outcome
        return ends.by_another(outcome, cause)

    def _own_card(self) -> Card:
        return self._met.cards[self._met.node_rank] if self._met is not None else self._card

    def _say_end(self, end: End) -> None:
        if self._spoke is not None:
            self._spoke.say(Message("end", end))

    def _wait_for_verdict(self, *, is_well: bool) -> End | None:
        """Return what began it all, None where every node ended well.

        A node that failed waits a moment only: then its own failure is what it knows.
        """
        assert self._spoke is not None
        seconds = math.inf if is_well else _VERDICT_SECONDS
        who = f"node {self._own_card().node_rank}, which has ended,"
        patience = Patience(math.inf, who, self.tell, self._check_for_long)
        while self._verdict is None and patience.waited < seconds:
            if (message := self._spoke.hear(_LOOK_SECONDS)) is not None:
                self._note(message)
                if is_well and self._called > self.attempt:
                    raise LaunchError("another node starts its workers again, this node's have ended well")
            elif self._spoke.lost:
                return self._lost_host()
            elif is_well:
                patience.look("the others")
        verdict = None if self._verdict is None else self._verdict.value
        assert verdict is None or isinstance(verdict, End)
        return verdict

    def _check_for_long(self) -> None:
        """Let those of other nodes that were asked to stop have their time, too."""
        try:
            self.check()
        except StopAsked:
            now = time.monotonic()
            if self._asked_to_stop is None:
                self._asked_to_stop = now
            if now - self._asked_to_stop > _STOP_SECONDS:
                raise

    def _lost_host(self) -> End:
        assert self._met is not None
        card = self._met.cards[self._met.host_rank]
        text = f"{card.name}, which holds the run together, is gone: its kernel has ended, or it is cut off the network"
        return End(card=card, kind="lost", text=text)

    def _with_value(self, outcome: Outcome) -> Outcome:
        """Put rank 0's value, from whichever node it is, into the outcome."""
        if not self._wants_first or 0 in outcome.values:
            return outcome
        assert self._spoke is not None
        while self._value is None:
            self._check_for_long()
            if (message := self._spoke.hear(_LOOK_SECONDS)) is not None:
                self._note(message)
            elif self._spoke.lost:
                return ends.by_another(outcome, self._lost_host())
        value, *buffers = self._value.parts
        result = Result(rank=0, time=self._value.value, value=bytes(value), buffers=buffers)
        return Outcome(values={0: unpack_value(result)}, stopped=outcome.stopped)

    def shutdown(self) -> bool:
        """Leave; the node with the hub stays until the others have heard what they wait for."""
        spoke, self._spoke = self._spoke, None
        if spoke is not None:
            spoke.say(Message("bye"))
            spoke.close()
        hub, self._hub = self._hub, None
        if hub is not None:
            try:
                ends = time.monotonic() + (_LEAVE_SECONDS if self._verdict is None else math.inf)
                while not hub.is_empty and time.monotonic() < ends:
                    self.check()
                    time.sleep(_LOOK_SECONDS / 25)
            except StopAsked:
                pass  # there is nothing more to stop here
            finally:
                hub.close()
        self._store = None
        return True


def _met_of(message: Message) -> Met:
    assert isinstance(message.value, Met)
    return message.value
