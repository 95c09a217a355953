"""One rank of a ``RankPool``: runs functions that arrive on a socket until it is closed.

``python rank_worker.py FD INIT``: FD is the socket, INIT is 1 if ``hvd.init()`` comes first.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection


def main() -> None:
    """Serves until the pool goes."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the pool asks for stacks when a rank hangs
    channel = Connection(int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    import torch  # noqa: PLC0415  (after faulthandler)

    import horo.torch as hvd  # noqa: PLC0415

    torch.set_num_threads(1)
    if sys.argv[2] == "1":
        hvd.init()
    channel.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            message = channel.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        channel.send_bytes(answer)
    hvd.shutdown()
    os._exit(0)  # an interpreter with torch takes a second to end; its end has a test of its own


if __name__ == "__main__":
    main()
