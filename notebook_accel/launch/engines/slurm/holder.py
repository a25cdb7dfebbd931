"""The job's own process, on its first node: lasts as long as an agent of a launch does. Runs as the text of this file.

It listens at a socket that only processes of this node reach, and ends where no agent connects, or none is left. So an
allocation ends by itself where the notebook is gone.
"""

import os
import select
import signal
import socket
import struct
import sys
import time


def hold(name: str, patience: float, grace: float) -> None:
    """Wait until no agent is connected any more.

    Args:
        name: of the socket.
        patience: seconds until the first agent connects.
        grace: seconds without any agent after that.
    """
    if sys.platform != "linux":
        raise NotImplementedError
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # sites send them before a time limit
        signal.signal(signum, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0" + name)
    listening.listen()
    connections = []  # type: list[socket.socket]
    deadline = time.monotonic() + patience
    while connections or time.monotonic() < deadline:
        ready, _, _ = select.select([listening, *connections], [], [], None if connections else grace / 4)
        for each in ready:
            if each is listening:
                connection = listening.accept()[0]
                sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", sent)[1] == os.getuid():
                    connections.append(connection)
            elif not each.recv(1):
                each.close()
                connections.remove(each)
                deadline = time.monotonic() + grace


if __name__ == "__main__":
    hold(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
