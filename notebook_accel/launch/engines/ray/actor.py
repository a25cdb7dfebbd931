"""The actor of one rank under Ray: the place of Ray's that the agent of a host is on, for that rank alone.

Nothing here imports torch: another process does, from which that of the rank starts, while other actors are still
being placed.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ....events import Buffer
from ....stream.listener import connect
from ...transfer.pickled import Pickled
from ...transfer.shared_memory import SharedPickle
from ..remote import agent
from ..remote.channel import Channel
from ..remote.rank_process import find_version, start_agent

_CONNECT_SECONDS: Final = 10.0


class RankActor:
    """Holds the process of one rank.

    Args:
        variables: environment variables of the rank, besides those of its node.
        with_ipython: whether to import IPython.
    """

    def __init__(self, variables: Mapping[str, str], with_ipython: bool) -> None:
        import ray

        own = os.path.dirname(ray.__file__) + os.sep  # with Ray's copies of other packages
        self._path = [place for place in sys.path if not os.path.abspath(place).startswith(own)]
        self._with_ipython = with_ipython
        self._agent = start_agent(self._path, variables, with_ipython=with_ipython)

    def describe(self) -> dict[str, Any]:
        """Return what the notebook has to know of this place."""
        import ray

        return {
            **agent.describe(),
            "address": ray.util.get_node_ip_address(),
            "node": ray.get_runtime_context().get_node_id(),
            "version": find_version(),
        }

    def serve(self, endpoint: tuple[str, int], token: bytes, number: int, parts: Sequence[Buffer]) -> str:
        """Serve the notebook until it ends the connection.

        Args:
            endpoint: host and port where the notebook listens.
            token: what the connection proves.
            number: of this actor.
            parts: the pickled function with its arguments, and the out-of-band buffers.

        Returns:
            Why the notebook cannot be reached, empty where it was.
        """
        # before the connection: it may take longer than an end may be silent
        with contextlib.closing(SharedPickle(Pickled(data=bytes(parts[0]), buffers=[*parts[1:]]))) as payload:
            try:
                connection = connect(endpoint, token, number, _CONNECT_SECONDS)
            except OSError as error:
                return error.strerror or str(error)
            with connection:
                channel = Channel(connection.fileno(), connection.fileno(), expects_news=False)
                server = agent.HostServer(
                    channel, self._path, self._with_ipython, math.inf, agent=self._agent, payload=payload
                )
                with contextlib.suppress(OSError):
                    server.run()
        return ""
