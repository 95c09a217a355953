"""The caller's side of ``horo.run``: a store with the function, a hororun, and the outcomes of its ranks."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from horo.bootstrap.store.protocol import StoreTimeoutError
from horo.errors import GroupError, HoroError, UnsupportedError, UsageError
from horo.runner.call.values import CALL, WORKERS, Call, Outcome, connect, get, outcome_key, put, result_key
from horo.runner.config import EXIT_USAGE

if TYPE_CHECKING:
    from horo.bootstrap.store.client import StoreClient
    from horo.bootstrap.store.server import StoreServer
    from horo.runner.config import Job

__all__ = ["check_outcomes", "run"]

_REPORT_LINES_MAX = 20
_NO_ERRORS = ("SystemExit", "SystemExit: 0")
"""The summaries of ranks that have ended without a result and without an error."""


def run(  # noqa: PLR0917 - the order of arguments is Horovod's
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: object = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` in ranks that hororun starts; blocks until all have ended.

    Works in scripts, at a prompt and in notebooks. ``func`` calls ``hvd.init()`` itself. It is pickled with
    cloudpickle, so it may be one of ``__main__``. Output of ranks appears here, each line after its rank.

    Args:
        func: The function, called once in each rank, in a process of its own.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of ranks.
        hosts: As ``hororun -H``: ``"h1:4,h2:4"``. None: this host, or those of the batch job.
        hostfile: As ``hororun --hostfile``.
        start_timeout: As ``hororun --start-timeout``, in seconds.
        ssh_port: As ``hororun --ssh-port``.
        ssh_identity_file: As ``hororun --ssh-identity-file``.
        output_filename: As ``hororun --output-filename``.
        verbose: If true, hororun describes its steps on stderr.
        use_gloo: True: ``hororun --gloo``.
        use_mpi: True: ``hororun --mpi``.
        mpi_args: As ``hororun --mpi-args``.
        network_interfaces: As ``hororun --network-interfaces``: a list, or names separated by commas.
        executable: The Python of the ranks. None: the one of hororun on each host.
        disable_cache: Taken and ignored: there is no cache of earlier checks.
        network_interface: Another name of ``network_interfaces``.
        np: Another name of ``num_proc``.
        min_num_proc: As ``hororun --min-np``: the job is elastic, and ``func`` calls ``hvd.elastic.run``.
        max_num_proc: As ``hororun --max-np``.
        slots: As ``hororun --slots-per-host``.
        reset_limit: As ``hororun --reset-limit``.
        cooldown_range: As ``hororun --blacklist-cooldown-range``: the shortest and the longest time in seconds.
        host_discovery_script: As ``hororun --host-discovery-script``.
        min_np: Another name of ``min_num_proc``.
        max_np: Another name of ``max_num_proc``.
        options: Further options of hororun, such as ``["--oversubscribe"]``.
        env: Variables for the ranks beside those of this process.

    Returns:
        What ``func`` has returned, in rank order; of an elastic job, in the ranks of its last generation.

    Raises:
        Exception: What ``func`` has raised in the rank that raised first, with the rank's traceback as its cause.
        UsageError: An argument is wrong; the message is hororun's.
        UnsupportedError: ``func`` or an argument that cannot be pickled.
        HoroError: A rank ended without a result; the message has hororun's report.

    Example:
        def rank_and_size(factor):
            import horo.torch as hvd
            hvd.init()
            return hvd.rank() * factor, hvd.size()

        results = horo.run(rank_and_size, (10,), np=1)  # [(0, 1)]
    """
    given = locals()
    if np is not None and num_proc not in (1, np):
        raise UsageError(f"horo.run: num_proc={num_proc} and np={np} are two names of one argument: give one of them")
    _check(func, args, kwargs, options, env or {}, num_proc if np is None else np)
    if use_gloo and use_mpi:
        raise UsageError("use_gloo and use_mpi are both true: choose one of them")
    words = _options_of(given)
    command = ["-m", "horo.runner.call"] if executable is None else [executable, "-m", "horo.runner.call"]
    call = _pickled(func, args, kwargs or {})
    secret = secrets.token_bytes(32)
    words, environment = _call_of_hororun(words, options, command, env or {}, secret)
    job = _parsed(words, environment)
    if job.command != tuple(command):
        raise UsageError(f"horo.run: options={list(options)} has a word that is no option of hororun")
    with _serve(job, secret) as server:
        environment["HORO_CALL_STORE"] = ",".join(map(str, server.endpoints))
        with connect(",".join(map(str, reversed(server.endpoints))), secret) as store:  # loopback is last
            put(store, CALL, call)
            del call
            code, report = _run_hororun(words, environment)
            if job.elastic is not None:
                return _results_of_workers(store, code, report)
            return _results(store, job.size, code, report)


def _call_of_hororun(
    words: Sequence[str], options: Sequence[str], command: Sequence[str], env: Mapping[str, str], secret: bytes
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of hororun; where the store is comes later."""
    exports = [word for name in (*env, "HORO_CALL_STORE", "HORO_CALL_SECRET") for word in ("-x", name)]
    environment = {**os.environ, **env, "HORO_CALL_STORE": "127.0.0.1:1", "HORO_CALL_SECRET": secret.hex()}
    environment.setdefault("PYTHONSAFEPATH", "1")  # imports nothing from the current directory, from Python 3.11 on
    return [*words, *options, *exports, "--", *command], environment


def _check(  # noqa: PLR0917
    func: object, args: object, kwargs: object, options: object, env: Mapping[str, str], count: object
) -> None:
    if not callable(func):
        raise UsageError(f"horo.run: {func!r} is not a function")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"horo.run: args={args!r} is no tuple of positional arguments")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"horo.run: kwargs={kwargs!r} is no mapping of names to arguments")
    if isinstance(options, str):
        raise UsageError(f"horo.run: options={options!r} is one text: give a list of words")
    if isinstance(count, bool) or not isinstance(count, int):
        raise UsageError(f"horo.run: {count!r} is no number of ranks")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str) or "=" in name or not name:
            raise UsageError(f"horo.run: env: {name!r}={value!r} is no variable: names and values are texts")


def _options_of(given: Mapping[str, Any]) -> list[str]:
    """The words of hororun for the arguments of ``run``, by name."""

    def either(name: str, other: str) -> Any:
        return given[name] if given[other] is None else given[other]

    interfaces = given["network_interfaces"] or given["network_interface"] or ()
    words = _words(
        {
            "--num-proc": either("num_proc", "np"),
            "--min-num-proc": either("min_num_proc", "min_np"),
            "--max-num-proc": either("max_num_proc", "max_np"),
            "--slots-per-host": given["slots"],
            "--reset-limit": given["reset_limit"],
            "--host-discovery-script": given["host_discovery_script"],
            "--hosts": given["hosts"],
            "--hostfile": given["hostfile"],
            "--start-timeout": given["start_timeout"],
            "--ssh-port": given["ssh_port"],
            "--ssh-identity-file": given["ssh_identity_file"],
            "--output-filename": given["output_filename"],
            "--verbose": bool(given["verbose"]),
            "--gloo": given["use_gloo"],
            "--mpi": given["use_mpi"],
            "--mpi-args": given["mpi_args"],
            "--network-interfaces": (interfaces if isinstance(interfaces, str) else ",".join(interfaces)) or None,
        }
    )
    cooldown = given["cooldown_range"]
    return words if cooldown is None else [*words, "--blacklist-cooldown-range", *map(str, cooldown)]


def _words(values: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f"{name}={value}")
    return words


def _pickled(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    from horo.runner.call.pickling import dumps  # noqa: PLC0415 - hororun does without

    try:
        function = dumps((func, tuple(args), dict(kwargs)))
    except Exception as error:
        name = getattr(func, "__qualname__", repr(func))
        raise UnsupportedError(f"horo.run: {name} or an argument of it cannot be pickled: {error}") from error
    folders = [folder or _current_directory() for folder in sys.path]
    own = next((index for index, folder in enumerate(folders) if folder.startswith((sys.prefix, sys.base_prefix))), 0)
    hidden = ["HORO_CALL_SECRET", *(["PYTHONSAFEPATH"] if "PYTHONSAFEPATH" not in os.environ else [])]
    return Call(function, folders[:own], folders[own:], hidden)


def _current_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as Python writes it
    except FileNotFoundError:
        raise UsageError("horo.run: the current directory does not exist any more") from None


def _parsed(words: Sequence[str], environment: Mapping[str, str]) -> Job:
    """The job that hororun will make of these words, so that a wrong one is an error of this call."""
    from horo.runner.cli import parse  # noqa: PLC0415
    from horo.runner.config import JobError  # noqa: PLC0415

    try:
        job = parse(words, environment=environment, raising=True)
    except JobError as error:
        raise UsageError(f"horo.run: {error}") from None
    except SystemExit:  # --help
        job = None
    if job is None or job.dry_run or job.check_hosts:
        raise UsageError("horo.run: options= has one with which hororun starts no ranks")
    return job


def _serve(job: Job, secret: bytes) -> StoreServer:
    from horo.bootstrap.store.served import choose_server_addresses  # noqa: PLC0415
    from horo.bootstrap.store.server import StoreServer  # noqa: PLC0415
    from horo.runner.network import is_local  # noqa: PLC0415

    far = not job.hosts or not all(is_local(host) for host in job.hosts)
    addresses = choose_server_addresses(",".join(job.interfaces) or None, near=True, far=far)
    return StoreServer(addresses, secret, ports=job.ports, clients=job.size)


def _run_hororun(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs hororun to its end; returns its exit code, and its own messages."""
    from horo.runner.call.notebook import viewer  # noqa: PLC0415
    from horo.runner.processes import spawn  # noqa: PLC0415

    # In a session of its own: Ctrl-C comes to this process alone, as in a notebook, and is passed on.
    command = [sys.executable, "-m", "horo.runner", *words]
    process = spawn(command, environment=environment, cwd=_current_directory(), last_signal=signal.SIGTERM)
    report = _Report()
    assert process.stdout is not None and process.stderr is not None
    pumps = [
        threading.Thread(target=_pump, args=(process.stdout, sys.stdout, None), daemon=True),
        threading.Thread(target=_pump, args=(process.stderr, sys.stderr, report), daemon=True),
        *viewer(process, environment),
    ]
    for pump in pumps:
        pump.start()
    try:
        _wait(process)
    finally:
        for pump in pumps:
            pump.join()
    return process.returncode, report.text()


class _Report:
    """The messages of hororun itself, or the last lines on stderr if there are none."""

    def __init__(self) -> None:
        self._own: deque[str] = deque(maxlen=_REPORT_LINES_MAX)
        self._last: deque[str] = deque(maxlen=_REPORT_LINES_MAX)

    def add(self, line: str) -> None:
        (self._own if line.startswith(("hororun: ", "  | ")) else self._last).append(line.rstrip("\n"))

    def text(self) -> str:
        return "\n".join(self._own or self._last)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end. An exception, such as KeyboardInterrupt, ends the job first; a second one ends it at once."""
    try:
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        raise


def _pump(source: Any, sink: TextIO | None, report: _Report | None) -> None:
    """Copies lines to a stream of this process, which in a notebook is not its descriptor."""
    os.set_blocking(source.fileno(), True)
    with io.BufferedReader(source) as lines:
        for raw in lines:
            line = raw.decode("utf-8", "replace")
            if report is not None:
                report.add(line)
            if sink is not None:
                with contextlib.suppress(OSError, ValueError):  # it is closed: the job goes on
                    sink.write(line)
                    sink.flush()


def _results(store: StoreClient, size: int, code: int, report: str) -> list[Any]:
    """In rank order; raises as ``check_outcomes``."""
    check_outcomes([_outcome(store, rank) for rank in range(size)], code, report)
    return [_result(store, rank) for rank in range(size)]


def _results_of_workers(store: StoreClient, code: int, report: str) -> list[Any]:
    """Of the last generation of an elastic job, in rank order; raises as ``check_outcomes`` if the job has failed."""
    found = [(number, _outcome(store, number)) for number in range(store.add(WORKERS, 0))]
    done = [(each.place, number) for number, each in found if each is not None and each.has_result]
    if code or not done:
        check_outcomes([each for _, each in found], code, report)
        raise HoroError(f"horo.run: no rank has come to the end of the function\n{report}".rstrip())
    last, _ = max(place for place, _ in done)
    return [_result(store, number) for (generation, _), number in sorted(done) if generation == last]


def _outcome(store: StoreClient, rank: int) -> Outcome | None:

    try:
        outcome: Outcome = get(store, outcome_key(rank), 0.0)
    except StoreTimeoutError:
        return None
    return outcome


def check_outcomes(outcomes: Sequence[Outcome | None], code: int, report: str) -> None:
    """Returns if every rank has a result.

    Raises:
        Exception: of the rank that failed first. The script's own come before those about another rank's end, and
            errors before ``sys.exit(0)``.
        UsageError: hororun has refused the job.
        HoroError: a rank has left neither a result nor an exception.
    """
    failed = [(rank, each) for rank, each in enumerate(outcomes) if each is not None and not each.has_result]
    errors = [(rank, each, _error_of(rank, each)) for rank, each in failed]
    errors.sort(key=lambda each: (isinstance(each[2], GroupError), each[1].summary in _NO_ERRORS, each[1].order))
    for rank, outcome, error in errors:
        raise error from HoroError(f"in rank {rank} ({outcome.host}):\n{outcome.text}")
    if code:
        kind = UsageError if code == EXIT_USAGE and not any(outcomes) else HoroError
        raise kind(f"horo.run: hororun ended with exit code {code}\n{report}".rstrip())
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if silent:
        raise HoroError(f"horo.run: rank {silent[0]} ended without a result and with exit code 0, as os._exit(0) does")


def _result(store: StoreClient, rank: int) -> Any:
    try:
        return get(store, result_key(rank), 0.0, once=True)
    except Exception as error:
        raise HoroError(
            f"horo.run: the result of rank {rank} cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error


def _error_of(rank: int, outcome: Outcome) -> BaseException:
    if outcome.error is not None:
        with contextlib.suppress(Exception):  # its class does not take its own arguments, say
            error = pickle.loads(outcome.error)
            if isinstance(error, BaseException):
                return error
    return HoroError(f"rank {rank} ended with {outcome.summary}")
