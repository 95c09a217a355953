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

from horo._bootstrap.ending import describe_exception
from horo._bootstrap.net.addresses import parse_endpoints
from horo._bootstrap.store.client import StoreClient
from horo._config import CallVariables, MpiVariables, drop_variables, environment, read_variables
from horo.errors import HoroError, UnsupportedError
from horo.runner.call.values import CALL, FAILURES, Call, Outcome, get, outcome_key, put

__all__ = ["main"]

_CONNECT_S = 60.0
_FOREVER_S = 1e6
_NEVER = "never"
_over = threading.Event()


def main() -> None:
    """Ends as the function does: an exception of it ends this process, and hororun ends the job."""
    call = read_variables(CallVariables, environment())
    if call.store is None or call.secret is None:
        sys.exit("horo.runner.call is for horo.run alone: its variables are not set")
    rank, process = _rank(environment()), os.getpid()
    with _connect(call) as store, _connect(call) as watched:
        threading.Thread(target=_end_with_caller, args=(watched,), daemon=True).start()
        wanted: Call = get(store, CALL, _CONNECT_S)
        drop_variables(wanted.hidden)
        own = [folder for folder in sys.path if folder not in wanted.front]
        sys.path[:] = [*wanted.front, *own, *(folder for folder in wanted.back if folder not in own)]
        try:
            outcome = _call(wanted, rank)
        except BaseException as error:
            if os.getpid() == process:
                outcome = _failure(error, store.add(FAILURES, 1))
            raise
        finally:
            if os.getpid() == process:  # else a process that the function has forked
                put(store, outcome_key(rank), outcome)
                _over.set()


def _call(wanted: Call, rank: int) -> Outcome:
    func, args, kwargs = cloudpickle.loads(wanted.function)
    result = func(*args, **kwargs)
    try:
        return Outcome(cloudpickle.dumps(result), None, "", "", socket.gethostname(), 0)
    except Exception as error:
        what = f"what {getattr(func, '__qualname__', func)!s} has returned in rank {rank}, a {type(result).__name__},"
        raise UnsupportedError(f"horo.run: {what} cannot be pickled: {error}") from error


def _connect(call: CallVariables) -> StoreClient:
    first, *others = parse_endpoints(call.store or "")
    return StoreClient(first.address, first.port, call.secret or b"", _CONNECT_S, others, hosted_by="horo.run")


def _rank(environ: Mapping[str, str]) -> int:
    """The number of this process: from hororun, or from the MPI that hororun has used."""
    own = environ.get("HOROVOD_RANK")  # what hororun sets; HORO_RANK may be one of the user's
    if own is not None:
        return int(own)
    mpi = read_variables(MpiVariables, environ)
    return int(mpi.ompi_rank or mpi.pmi_rank or mpi.pmix_rank or 0)


def _end_with_caller(store: StoreClient) -> None:
    """Ends this process when the caller is gone, however it went."""
    try:
        store.get(_NEVER, _FOREVER_S)
    except (HoroError, OSError):
        if not _over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def _failure(error: BaseException, order: int) -> Outcome:
    text = summary = describe_exception(error)
    with contextlib.suppress(Exception):  # a class without a module, say
        text = "".join(traceback.format_exception(error))
    pickled = None
    if isinstance(error, Exception):  # SystemExit would end the caller
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
    return Outcome(None, pickled, text, summary, socket.gethostname(), order)


if __name__ == "__main__":
    main()
