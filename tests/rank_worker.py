"""One rank of a ``RankPool``: runs functions that arrive on a connection until it is closed."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

import horo.torch as hvd

STACKS_END = "in serve\n"
"""How a worker's stacks end."""


def serve(channel: Connection[Any, Any], environment: dict[str, str], log: str, init: bool) -> None:
    """The life of a rank; ``init``: call ``hvd.init()`` before the first function."""
    gc.freeze()  # what is there already stays, and no search for garbage looks at it
    multiprocessing.set_start_method("fork", force=True)  # of a DataLoader's workers: that of most scripts
    os.environ.update(environment)
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # the pool asks for stacks when a rank hangs
    torch.set_num_threads(1)
    try:
        if init:
            hvd.init()
        answer = pickle.dumps((True, None))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    channel.send_bytes(answer)
    while True:
        try:
            message = channel.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(message)
            torch.manual_seed(0)  # models are equal on all ranks, whatever an earlier test of this pool drew
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        channel.send_bytes(answer)
    hvd.shutdown()
    os._exit(0)  # an interpreter with torch takes a second to end; its end has a test of its own
