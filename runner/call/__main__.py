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
from typing import TYPE_CHECKING

from horo.bootstrap.elastic import membership
from horo.bootstrap.ending import describe_exception
from horo.config.table import CallVariables, MpiVariables, drop_variables, environment, read_variables
from horo.errors import HoroError, UnsupportedError
from horo.runner.call.pickling import Pickler, dumps
from horo.runner.call.values import CALL, FAILURES, WORKERS, Call, Outcome, connect, get, outcome_key, put, result_key

if TYPE_CHECKING:
    from horo.bootstrap.store.client import StoreClient

__all__ = ["main"]

_CALL_S = 60.0
_FOREVER_S = 1e6
_NEVER = "never"
_over = threading.Event()


def main() -> None:
    """Ends as the function does: an exception of it ends this process, and hororun ends the job."""
    call = read_variables(CallVariables, environment())
    if call.store is None or call.secret is None:
        sys.exit("horo.runner.call is for horo.run alone: its variables are not set")
    process = os.getpid()
    member = membership()
    with connect(call.store, call.secret) as store, connect(call.store, call.secret) as watched:
        rank = _rank(environment()) if member is None else store.add(WORKERS, 1) - 1
        threading.Thread(target=_end_with_caller, args=(watched,), daemon=True).start()
        wanted: Call = get(store, CALL, _CALL_S)
        drop_variables(wanted.hidden)
        own = [folder for folder in sys.path if folder not in wanted.front]
        sys.path[:] = [*wanted.front, *own, *(folder for folder in wanted.back if folder not in own)]
        try:
            outcome = _call(store, wanted, rank, process)
        except BaseException as error:
            if os.getpid() == process:
                outcome = _failure(error, store.add(FAILURES, 1))
            raise
        finally:
            if os.getpid() == process:  # else a process that the function has forked
                if member is not None:
                    outcome = outcome._replace(place=(member.generation, member.rank))
                put(store, outcome_key(rank), outcome)
                _over.set()


def _call(store: StoreClient, wanted: Call, rank: int, process: int) -> Outcome:
    func, args, kwargs = pickle.loads(wanted.function)
    result = func(*args, **kwargs)
    if os.getpid() == process:
        try:
            put(store, result_key(rank), result, Pickler)
        except (HoroError, OSError):
            raise
        except Exception as error:
            name = getattr(func, "__qualname__", func)
            what = f"what {name!s} has returned in rank {rank}, a {type(result).__name__},"
            raise UnsupportedError(f"horo.run: {what} cannot be pickled: {error}") from error
    return Outcome(True, None, "", "", socket.gethostname(), 0)


def _rank(environ: Mapping[str, str]) -> int:
    """The number of this process: from hororun, or from the MPI that hororun has used."""
    own = environ.get("HORO_RANK")
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
            pickled = dumps(error)
            pickle.loads(pickled)
    return Outcome(False, pickled, text, summary, socket.gethostname(), order)


if __name__ == "__main__":
    main()
