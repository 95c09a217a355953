"""``python -m horo.runner.call``: a rank of ``horo.run``. Fetches the function, calls it, and stores its outcome."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping

import cloudpickle  # type: ignore[import-untyped]

from horo._bootstrap.net.addresses import parse_endpoints
from horo._bootstrap.store.client import StoreClient
from horo._config import CallVariables, LaunchVariables, MpiVariables, read_variables
from horo.errors import HoroError
from horo.runner.call.values import CALL, Call, Outcome, get, outcome_key, put

__all__ = ["main"]

_CONNECT_S = 60.0
_FOREVER_S = 1e6
_NEVER = "never"
_over = threading.Event()


def main() -> None:
    """Ends as the function does: an exception of it ends this process, and hororun ends the job."""
    call = read_variables(CallVariables, os.environ)
    if call.store is None or call.secret is None:
        sys.exit("horo.runner.call is for horo.run alone: its variables are not set")
    rank = _rank(os.environ)
    with _connect(call) as store, _connect(call) as watched:
        threading.Thread(target=_end_with_caller, args=(watched,), daemon=True).start()
        wanted: Call = get(store, CALL, _CONNECT_S)
        sys.path += [folder for folder in wanted.path if folder not in sys.path]
        try:
            func, args, kwargs = cloudpickle.loads(wanted.function)
            outcome = Outcome(cloudpickle.dumps(func(*args, **kwargs)), None, "", socket.gethostname())
        except BaseException as error:
            outcome = _failure(error)
            raise
        finally:
            put(store, outcome_key(rank), outcome)
            _over.set()


def _connect(call: CallVariables) -> StoreClient:
    first, *others = parse_endpoints(call.store or "")
    return StoreClient(first.address, first.port, call.secret or b"", _CONNECT_S, others, hosted_by="horo.run")


def _rank(environ: Mapping[str, str]) -> int:
    """The number of this process: from hororun, or from the MPI that hororun has used."""
    own = read_variables(LaunchVariables, environ).rank
    if own is not None:
        return own
    mpi = read_variables(MpiVariables, environ)
    return int(mpi.ompi_rank or mpi.pmi_rank or mpi.pmix_rank or 0)


def _end_with_caller(store: StoreClient) -> None:
    """Ends this process when the caller is gone, however it went."""
    try:
        store.get(_NEVER, _FOREVER_S)
    except (HoroError, OSError):
        if not _over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def _failure(error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(error))
    pickled = None
    if isinstance(error, Exception):  # SystemExit would end the caller
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
    return Outcome(None, pickled, text, socket.gethostname())


if __name__ == "__main__":
    main()
