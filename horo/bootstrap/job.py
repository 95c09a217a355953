"""Starts a rank: ``start`` takes an environment and returns a running rank, as ``init()`` promises."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from horo.bootstrap.core_setup import setup_of
from horo.bootstrap.directory import Directory, PeerAddress
from horo.bootstrap.elastic import membership
from horo.bootstrap.ending import EndReporter
from horo.bootstrap.host.arena import Arena, join_arena
from horo.bootstrap.host.grouping import Grouping, Link, group_ranks
from horo.bootstrap.host.identity import read_identity
from horo.bootstrap.launchers.detect import detect_launch
from horo.bootstrap.launchers.inherited import name_rank, refuse_inherited
from horo.bootstrap.launchers.slurm_store import open_slurm_store
from horo.bootstrap.launchers.torch_store import open_torch_store
from horo.bootstrap.launchers.variables import Launch, Place
from horo.bootstrap.links import by_host, connect_hosts
from horo.bootstrap.log import prepare_log
from horo.bootstrap.mpi.data import carries_data, check_mpi, mpi_use
from horo.bootstrap.mpi.world import open_mpi_store
from horo.bootstrap.net.interfaces import check_interfaces
from horo.bootstrap.net.open_files import make_room
from horo.bootstrap.peer_info import PeerInfo, core_count, exchange_peer_info, machine_count, place_of, places_alike
from horo.bootstrap.rendezvous import Rendezvous
from horo.bootstrap.running_rank import Connection, RunningRank, watch
from horo.bootstrap.start_secret import derive_start_secret
from horo.bootstrap.startup_report import describe_gradients, describe_job, describe_rank
from horo.bootstrap.store.client import StoreClient
from horo.bootstrap.store.protocol import Store, prefixed
from horo.bootstrap.store.served import ServedStore
from horo.bootstrap.store.signed import OpenStore, signed
from horo.bootstrap.timeline_file import begin_timeline
from horo.bootstrap.torch_rounds import in_round
from horo.bootstrap.tuned_values import check_log, first_values, search_of, slot_bytes, sockets_to_open
from horo.config.ignored import misspelt, passed_over
from horo.config.settings import settings_of
from horo.config.table import Config, LaunchVariables, drop_variables, environment, read_config, read_variables
from horo.core.context import simd_name, version
from horo.core.memory import arena_bytes, create_memory
from horo.core.setup import MpiUse, Setup, close_setup
from horo.diagnostics.board import BOARD_BYTES, Board
from horo.errors import InternalError, ResourceError

__all__ = ["connect", "start"]


@dataclass
class _Starts:
    """The number of starts of this rank in this process, and the keys that the last start left in the store."""

    count: int = 0
    leftovers: list[str] = field(default_factory=list)


_starts: dict[Launch | str, _Starts] = {}
"""All ranks of a job start equally often, so the count identifies the start, except in an elastic job, by its id."""


def start(
    environ: Mapping[str, str] | None = None,
    comm: Any = None,
    arguments: Mapping[str, Any] | None = None,
    threads: int | None = None,
    device: int | None = None,
) -> RunningRank:
    """Joins the job that the environment describes; without a launcher, a job of one rank.

    Args:
        environ: instead of this process's environment.
        comm: the processes that form the job, see ``detect.detect_launch``.
        arguments: settings that come before those of the environment.
        threads: those with which this rank computes gradients, for the line at the start; None: it computes none.
        device: the number of the GPU for NCCL, if the program has chosen one.

    Raises:
        UsageError: a variable or an argument is wrong, the launcher's environment incomplete, or ``comm`` unfit.
        MismatchError: ranks differ in version or in settings that must be equal.
        GroupError: a rank is missing, failed, or cannot be reached; the message names it.
        ResourceError: no memory, descriptor or address; no GPU or NCCL for a job that is to use it.
    """
    is_own = environ is None
    environ = environment() if environ is None else environ
    arguments = arguments or {}
    config = read_config(environ, arguments)
    if is_own:
        drop_variables(refuse_inherited(environ))
    member = membership() if is_own else None
    launch = detect_launch(environ, config, comm) if member is None else member.launch(comm)
    if is_own:
        name_rank(environ, launch)
    prepare_log(config.log_level, launch.rank)
    if launch.rank == 0:
        for sentence in (*misspelt(environ), *passed_over(environ, arguments)):
            logging.getLogger("horo").warning(sentence)
    reporter = EndReporter(read_variables(LaunchVariables, environ).end_pipe, launch.ranks)
    reporter.joined()
    watch(reporter, ends_at_once=reporter.has_reader or launch.mpi is not None)
    starts = _starts.setdefault(launch if launch.generation is None else launch.job_id, _Starts())
    starts.count = launch.generation or starts.count + 1
    began = time.monotonic()
    connection = connect(launch, config, starts.count, starts.leftovers, has_board=True)
    try:
        chosen = {"segment_bytes": _first_segment(connection.setup), "gradients_ready": connection.gradients_ready}
        job = RunningRank(connection, reporter, settings_of(config, chosen))
    except BaseException:
        close_setup(connection.setup)
        raise
    job.context.blocked_after_s, job.context.is_alone = config.deadlock_time_s, is_own
    if config.gpu_operations == "nccl":
        try:
            job.connect_nccl(device)
            if launch.rank == 0:
                logging.getLogger("horo").info("NCCL does what it can of tensors on cuda:%d", job.nccl_device)
        except BaseException as error:
            job.close(f"init() has failed: {error}")
            raise
    _say_start(launch, connection, time.monotonic() - began, threads)
    begin_timeline(job, config)
    if member is not None:
        member.joined()
    return job


def _first_segment(setup: Setup) -> int:
    return setup.segment_bytes if setup.tuned is None else setup.tuned["segment"]


def _say_start(launch: Launch, connection: Connection, seconds: float, threads: int | None) -> None:
    log, setup = logging.getLogger("horo"), connection.setup
    if setup.rank == 0:
        gradients = "" if threads is None else describe_gradients(setup, connection.overlap, threads, connection.cores)
        log.info(describe_job(setup, launch, version(), simd_name(), gradients))
    log.debug(describe_rank(setup, connection.place, os.getpid(), connection.cores, seconds))


def connect(
    launch: Launch,
    config: Config,
    epoch: int,
    leftovers: list[str],
    torch_store: tuple[OpenStore, str | None] | None = None,
    *,
    has_board: bool = False,
) -> Connection:
    """Does all steps of ``start`` before the context exists.

    Args:
        launch: the launcher's facts about this process.
        config: settings of this process.
        epoch: number of this start of the job, equal on all ranks.
        leftovers: keys of this rank from its earlier starts, deleted once all ranks are in this one; keys of this start
            that stay in the store are appended.
        torch_store: the store, in place of the launcher's, and the address of this machine from which it is reached.
        has_board: whether ranks of a host show one another their last steps.
    """
    if launch.size == 1:
        return _alone(launch, config)
    if launch.torch_master is not None:
        opened = open_torch_store(launch.torch_master, launch.started_rank, config.start_timeout_s)
        launch, torch_store = in_round(launch, opened[0], config.start_timeout_s), opened
    open_rendezvous = partial(_open_rendezvous, launch, config, epoch, leftovers)
    store, secret, address = _open_store(launch, config, epoch, open_rendezvous, torch_store)
    try:
        with open_rendezvous(store=store) as rendezvous:
            if isinstance(store, ServedStore):
                store.check_room()  # here, where the other ranks get the error, too
            elif (
                launch.torch_master is None and torch_store is not None and (missing := make_room(2 * launch.size + 2))
            ):
                raise ResourceError(f"a group of {launch.size} ranks needs {missing}")
            forget = partial(_forget, store, leftovers)
            return _join(_Start(launch, config, epoch, rendezvous, address, forget, has_board), secret)
    finally:
        store.close()


@contextmanager
def _open_rendezvous(
    launch: Launch, config: Config, epoch: int, leftovers: list[str], *, store: Store, part: str = ""
) -> Iterator[Rendezvous]:
    """A rendezvous for ``part`` of a start; an exception that ends it is published to the other ranks."""
    prefix = f"horo/{launch.job_id}/{epoch}/{part}"
    rendezvous = Rendezvous(prefixed(store, prefix), launch.rank, launch.size, launch.host_name, config.start_timeout_s)
    try:
        yield rendezvous
    except BaseException as error:
        rendezvous.fail(error)
        raise
    finally:
        leftovers += [prefix + key for key in rendezvous.leftovers]


def _forget(store: Store, leftovers: list[str]) -> None:
    if leftovers:
        store.delete(leftovers)
        leftovers.clear()


def _open_store(
    launch: Launch,
    config: Config,
    epoch: int,
    open_rendezvous: Callable[..., AbstractContextManager[Rendezvous]],
    torch_store: tuple[OpenStore, str | None] | None,
) -> tuple[Store, bytes, str | None]:
    """The store, the secret of this start, and the address from which the store is reached."""
    if torch_store is not None:
        store, address = torch_store
        with open_rendezvous(store=signed(store, launch.secret), part="nonces/") as rendezvous:
            secret = derive_start_secret(rendezvous, launch.secret)
        return signed(store, secret), secret, address
    if launch.mpi is not None:
        client, secret = open_mpi_store(launch.mpi, config)
    elif launch.slurm is not None:
        client, secret = open_slurm_store(launch, config, epoch)
    elif launch.secret is not None and launch.endpoints:
        first, *others = launch.endpoints
        client, secret = StoreClient(*first, launch.secret, config.start_timeout_s, others), launch.secret
    else:
        raise InternalError(f"rank {launch.rank} has no address of a store")
    return client, secret, client.local_address


@dataclass(frozen=True)
class _Start:
    """The values that all steps of one start need."""

    launch: Launch
    config: Config
    epoch: int
    rendezvous: Rendezvous
    address: str | None
    forget_earlier: Callable[[], None]
    has_board: bool


def _join(start: _Start, secret: bytes) -> Connection:
    launch, config, rendezvous = start.launch, start.config, start.rendezvous
    rendezvous.enter()
    check_mpi(config, launch.mpi)
    check_interfaces(config.network_interfaces, config.told("network_interfaces"))
    check_log(config, launch.rank)
    identity = read_identity(config.host_id)
    infos = exchange_peer_info(rendezvous, PeerInfo.of(launch, config, identity, start.address, version()))
    start.forget_earlier()  # not before: until now a slower rank may have read keys of the last start
    candidates = group_ranks([info.identity for info in infos]).members(launch.rank)
    segment_bytes = slot_bytes(config, machine_count(infos))
    arena, grouping = join_arena(
        rendezvous,
        candidates,
        secret,
        start.epoch,
        lambda count: arena_bytes(count, segment_bytes),
        board_bytes=BOARD_BYTES if start.has_board else 0,
    )
    try:
        by_mpi = carries_data(config, launch.mpi, [info.mpi_threads for info in infos], grouping)
        use = mpi_use(launch.mpi, launch.rank, grouping) if launch.mpi is not None and by_mpi else None
        directory = _directory(start, infos, grouping, secret, data_by_mpi=by_mpi)
        links = connect_hosts(rendezvous, directory)
        try:
            rendezvous.finish()
        except BaseException:
            links.abort()
            raise
        board = _board(arena, launch.rank, grouping)
    except BaseException:
        arena.close()
        raise
    setup = _build_setup(start, infos, grouping, arena, links.finish(), use=use)
    return Connection(
        setup,
        place_of(launch, infos, grouping),
        places_alike(infos, grouping),
        grouping.hosts,
        core_count([infos[rank] for rank in grouping.members(launch.rank)]),
        start.config.overlap,
        start.config.gradients_ready_default,
        directory,
        launch.mpi,
        search_of(config, setup, machine_count(infos)),
        board,
    )


def _board(arena: Arena, rank: int, grouping: Grouping) -> Board | None:
    """Takes the descriptor over. A host that is not the whole job has none: its ranks do not know the slowest."""
    fd, arena.board = arena.board, -1
    if fd >= 0 and len(grouping.hosts) > 1:
        os.close(fd)
        return None
    return Board(fd, rank, grouping.members(rank)) if fd >= 0 else None


def _directory(
    start: _Start, infos: Sequence[PeerInfo], grouping: Grouping, secret: bytes, *, data_by_mpi: bool
) -> Directory:
    return Directory(
        rank=start.launch.rank,
        grouping=grouping,
        peers=[PeerAddress(info.identity.machine, info.address) for info in infos],
        host_names=[info.host for info in infos],
        secret=secret,
        epoch=start.epoch,
        timeout_s=start.config.start_timeout_s,
        interfaces=start.config.network_interfaces,
        ports=start.config.ports,
        sockets_per_peer=sockets_to_open(start.config),
        data_by_mpi=data_by_mpi,
    )


def _build_setup(
    start: _Start,
    infos: Sequence[PeerInfo],
    grouping: Grouping,
    arena: Arena,
    links: Mapping[Link, socket.socket],
    *,
    use: MpiUse | None,
) -> Setup:
    control, data = by_host(links, len(grouping.hosts), sockets_to_open(start.config))
    machines = machine_count(infos)
    return setup_of(
        start.config,
        rank=start.launch.rank,
        names=[info.host for info in infos],
        grouping=grouping,
        arena=arena,
        control=control,
        data=data,
        segment_bytes=slot_bytes(start.config, machines),
        mpi=use,
        tuned=first_values(start.config, machines) if start.config.autotune else None,
    )


def _alone(launch: Launch, config: Config) -> Connection:
    """A job of one rank: memory of its own, no store, no socket."""
    check_interfaces(config.network_interfaces, config.told("network_interfaces"))
    grouping = Grouping((0,))
    segment_bytes = slot_bytes(config, 1)
    arena = Arena(create_memory(arena_bytes(1, segment_bytes)), [], [-1])
    setup = setup_of(
        config,
        rank=0,
        names=[launch.host_name],
        grouping=grouping,
        arena=arena,
        control=[-1],
        data=[-1] * sockets_to_open(config),
        segment_bytes=segment_bytes,
    )
    directory = Directory(
        rank=0,
        grouping=grouping,
        peers=[PeerAddress(read_identity(config.host_id).machine, None)],
        host_names=[launch.host_name],
        secret=b"",
        epoch=0,
        timeout_s=config.start_timeout_s,
        sockets_per_peer=sockets_to_open(config),
    )
    cores = len(os.sched_getaffinity(0))
    ready = config.gradients_ready_default
    return Connection(
        setup, Place(0, 1, 0, 1), True, grouping.hosts, cores, config.overlap, ready, directory, launch.mpi
    )
