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

from horo._autotune import Search, Tuner
from horo._bootstrap import ending, living
from horo._bootstrap.core_setup import setup_of
from horo._bootstrap.directory import Directory, PeerAddress
from horo._bootstrap.ending import EndReporter, culprit_of
from horo._bootstrap.gpu_libraries import tell_difference
from horo._bootstrap.host.arena import Arena, join_arena
from horo._bootstrap.host.grouping import Grouping, Link, group_ranks
from horo._bootstrap.host.identity import read_identity
from horo._bootstrap.launchers.detect import detect_launch
from horo._bootstrap.launchers.environment import Launch, Place
from horo._bootstrap.launchers.inherited import name_rank, refuse_inherited
from horo._bootstrap.launchers.slurm_store import open_slurm_store
from horo._bootstrap.launchers.torch_store import open_torch_store
from horo._bootstrap.links import by_host, connect_hosts
from horo._bootstrap.log import prepare_log
from horo._bootstrap.mpi.data import carries_data, check_mpi, mpi_use
from horo._bootstrap.mpi.exit import watch_end, watch_loss
from horo._bootstrap.mpi.world import MpiWorld, open_mpi_store
from horo._bootstrap.net.interfaces import check_interfaces
from horo._bootstrap.peer_info import PeerInfo, core_count, exchange_peer_info, machine_count, place_of, places_alike
from horo._bootstrap.rendezvous import Rendezvous
from horo._bootstrap.start_secret import derive_start_secret
from horo._bootstrap.store.client import StoreClient
from horo._bootstrap.store.protocol import Store, prefixed
from horo._bootstrap.store.served import ServedStore
from horo._bootstrap.store.signed import signed
from horo._bootstrap.summary import describe_gradients, describe_job, describe_rank
from horo._bootstrap.teams import add_team
from horo._bootstrap.timeline import begin_timeline
from horo._bootstrap.tuning import (
    check_log,
    first_values,
    overlap_pays,
    search_of,
    slot_bytes,
    sockets_to_open,
    tuned_overlap,
    tuned_settings,
)
from horo._config import Config, LaunchVariables, drop_variables, environment, read_config, read_variables
from horo._core import Context, arena_bytes, create_memory, create_wake, simd_name, version
from horo._core_setup import MpiUse, Setup, close_all, close_setup
from horo._passed_over import misspelt, passed_over
from horo._settings import Settings, settings_of
from horo.errors import AbortedError, GroupError, InternalError, NotInitializedError

__all__ = ["Connection", "RunningRank", "connect", "start"]


@dataclass(frozen=True)
class Connection:
    """A rank with all its descriptors, before a context owns them."""

    setup: Setup
    place: Place
    is_homogeneous: bool
    hosts: tuple[tuple[int, ...], ...]
    cores: int
    overlap: str
    gradients_ready: str
    directory: Directory = field(repr=False)
    mpi: MpiWorld | None = None
    """The MPI world of the job; None if the ranks did not start through MPI."""
    gpu_warning: str = ""
    """As ``RunningRank.gpu_warning``."""
    search: Search | None = None
    """Rank 0's, in a job that is autotuned."""


class RunningRank:
    """One rank of a running job.

    Attributes:
        context: the native context.
        rank, size: rank and size in the job.
        local_rank, local_size, cross_rank, cross_size: among the hosts, as the launcher counts them.
        is_homogeneous: whether all hosts have equally many ranks.
        hosts: the ranks of each host, that is of each set of ranks that share memory.
        host_names: host names by rank.
        cores: number of cores on which the ranks of this host may run, together.
        overlap: the user's choice for ``HORO_OVERLAP``, or that of autotuning; see ``overlap_now``.
        gradients_ready: ``HORO_GRADIENTS_READY``, or its default.
        directory: addresses of all ranks and the job's secret; ``team_links`` needs them to make more links.
        mpi: the MPI world of the job; None if the ranks did not start through MPI.
        settings: those in force at the start; see ``settings_now``.
        thread_error: the exception that has ended a thread of this rank which took part in operations; empty: none.
        gpu_warning: to be logged when this rank uses a GPU for the first time; empty: nothing.
    """

    def __init__(
        self, connection: Connection, reporter: EndReporter | None = None, settings: Settings | None = None
    ) -> None:
        setup = connection.setup
        self.settings = settings or Settings({}, {})
        self.context = Context(setup, is_logged=True)
        self.rank, self.size = setup.rank, setup.size
        self.local_rank, self.local_size, self.cross_rank, self.cross_size = connection.place
        self.is_homogeneous = connection.is_homogeneous
        self.hosts = connection.hosts
        self.cores, self.overlap = connection.cores, connection.overlap
        self._tunes_overlap = setup.tuned is not None
        self._tuned_from = setup.tuned
        self._tuner = None if connection.search is None else Tuner(self.context, connection.search)
        self.gradients_ready = connection.gradients_ready
        self.directory = connection.directory
        self.mpi, self.gpu_warning = connection.mpi, connection.gpu_warning
        if self.mpi is not None:
            if self.mpi.size == self.mpi.mpi.COMM_WORLD.Get_size():
                living.LOSSES.clear()  # all ranks of MPI have come again: what an earlier job has lost was only late
            watch_loss(living.find_loss)
            watch_end(self.mpi.mpi, living.close_all)
        self.host_names = tuple(setup.host_name_of_rank)
        self._reporter = reporter or EndReporter(None)
        self._pid = os.getpid()
        self._closed = False
        self.thread_error = ""
        self._teams_begun = 0
        living.RANKS.add(self)

    def overlap_now(self) -> str:
        """The value of ``HORO_OVERLAP`` for the next backward."""
        if self._tunes_overlap:
            self.overlap, self._tunes_overlap = tuned_overlap(self.context, self.overlap)
        return self.overlap

    def overlap_pays(self, threads: int) -> bool:
        """Whether the next gradients are reduced while backward still runs, with so many threads of ranks here."""
        return overlap_pays(self.overlap_now(), len(self.hosts), threads, self.cores)

    @property
    def is_tuned(self) -> bool:
        """Whether autotuning may change settings."""
        return self._tuned_from is not None

    def settings_now(self) -> Settings:
        """The settings in force on this rank, with the changes by autotuning. The caller keeps the context open."""
        if self._tuned_from is None:
            return self.settings
        return self.settings.tuned(tuned_settings(self.context, self._tuned_from))

    @property
    def is_searching(self) -> bool:
        """Whether this rank measures the steps of optimizers, for ``end_step``."""
        return self._tuner is not None

    def end_step(self, optimizer: object) -> None:
        """Called at the end of each step of an optimizer of all ranks. The caller keeps the context open."""
        if self._tuner is not None and self._tuner.end_step(optimizer):
            self._tuner = None

    def close(self, words: str = "") -> None:
        """Leaves the job, announces that to the peers, frees everything; idempotent. Does nothing in a forked child.

        Args:
            words: what this rank has done, for other ranks that still wait for it; empty: it has shut horo down.
        """
        if not self._closed and os.getpid() == self._pid:
            living.RANKS.discard(self)
            self.note_loss()
            self._reporter.lost(culprit_of(self.context.health()))
            if words or self.thread_error:
                self.context.end(self.thread_error or words, has_failed=bool(self.thread_error))
            self.context.destroy()
            if self._tuner is not None:
                self._tuner.close()
            if not living.RANKS:
                ending.unwatch_exceptions()
            self._closed = True  # last: a signal handler may raise before, or come here, too

    def add_team(self, ranks: Sequence[int]) -> int:
        """Adds a team of ranks that do collectives among themselves; all ranks of the job call it, see ``teams``."""
        return add_team(self.context, self.directory, self._teams_begun + 1, ranks, self._begin_team)

    def _begin_team(self) -> None:
        self._teams_begun += 1

    def note_loss(self) -> None:
        """Records, under MPI, the loss of a peer for the exit handler, which must not wait for it.

        A rank with an error in a thread has left in order, and finalizes MPI as any other.
        """
        health = self.context.health() if self.mpi is not None else None
        has_left = isinstance(health, (AbortedError, NotInitializedError)) or str(health).endswith(living.IN_THREAD)
        if isinstance(health, GroupError) and not has_left:
            living.LOSSES.append(health)

    def forked(self) -> None:
        """Called in a forked child."""
        self.context.after_fork()


@dataclass
class _Starts:
    """The number of starts of this rank in this process, and the keys that the last start left in the store."""

    count: int = 0
    leftovers: list[str] = field(default_factory=list)


_starts: dict[Launch, _Starts] = {}
"""All ranks of a job start equally often, so the count identifies the start."""


def start(
    environ: Mapping[str, str] | None = None,
    comm: Any = None,
    arguments: Mapping[str, Any] | None = None,
    threads: int | None = None,
) -> RunningRank:
    """Joins the job that the environment describes; without a launcher, a job of one rank.

    Args:
        environ: instead of this process's environment.
        comm: the processes that form the job, see ``detect.detect_launch``.
        arguments: settings that come before those of the environment.
        threads: those with which this rank computes gradients, for the line at the start; None: it computes none.

    Raises:
        UsageError: a variable or an argument is wrong, the launcher's environment incomplete, or ``comm`` unfit.
        MismatchError: ranks differ in version or in settings that must be equal.
        GroupError: a rank is missing, failed, or cannot be reached; the message names it.
        ResourceError: no memory, descriptor or address.
    """
    is_own = environ is None
    environ = environment() if environ is None else environ
    arguments = arguments or {}
    config = read_config(environ, arguments)
    if is_own:
        drop_variables(refuse_inherited(environ))
    launch = detect_launch(environ, config, comm)
    if is_own:
        name_rank(environ, launch)
    prepare_log(config.log_level, launch.rank)
    if launch.rank == 0:
        for sentence in (*misspelt(environ), *passed_over(environ, arguments)):
            logging.getLogger("horo").warning(sentence)
    reporter = EndReporter(read_variables(LaunchVariables, environ).end_pipe, launch.ranks)
    reporter.joined()
    living.watch(reporter, ends_at_once=reporter.has_reader or launch.mpi is not None)
    starts = _starts.setdefault(launch, _Starts())
    starts.count += 1
    began = time.monotonic()
    connection = connect(launch, config, starts.count, starts.leftovers)
    try:
        chosen = {"segment_bytes": _first_segment(connection.setup), "gradients_ready": connection.gradients_ready}
        job = RunningRank(connection, reporter, settings_of(config, chosen))
    except BaseException:
        close_setup(connection.setup)
        raise
    job.context.blocked_after_s, job.context.is_alone = config.deadlock_time_s, is_own
    _say_start(launch, connection, time.monotonic() - began, threads)
    begin_timeline(job, config)
    return job


def _first_segment(setup: Setup) -> int:
    return setup.segment_bytes if setup.tuned is None else setup.tuned["segment"]


def _say_start(launch: Launch, connection: Connection, seconds: float, threads: int | None) -> None:
    log, setup = logging.getLogger("horo"), connection.setup
    if setup.rank == 0:
        gradients = "" if threads is None else describe_gradients(setup, connection.overlap, threads, connection.cores)
        log.info(describe_job(setup, launch, version(), simd_name(), gradients))
    log.debug(describe_rank(setup, connection.place, os.getpid(), connection.cores, seconds))


def connect(launch: Launch, config: Config, epoch: int, leftovers: list[str]) -> Connection:
    """Does all steps of ``start`` before the context exists.

    Args:
        launch: the launcher's facts about this process.
        config: settings of this process.
        epoch: number of this start of the job, equal on all ranks.
        leftovers: keys of this rank from its earlier starts, deleted once all ranks are in this one; keys of this start
            that stay in the store are appended.
    """
    if launch.size == 1:
        return _alone(launch, config)
    open_rendezvous = partial(_open_rendezvous, launch, config, epoch, leftovers)
    store, secret, address = _open_store(launch, config, epoch, open_rendezvous)
    try:
        with open_rendezvous(store=store) as rendezvous:
            if isinstance(store, ServedStore):
                store.check_room()  # here, where the other ranks get the error, too
            return _join(_Start(launch, config, epoch, rendezvous, address, partial(_forget, store, leftovers)), secret)
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
    launch: Launch, config: Config, epoch: int, open_rendezvous: Callable[..., AbstractContextManager[Rendezvous]]
) -> tuple[Store, bytes, str | None]:
    """The store, the secret of this start, and the address from which the store is reached."""
    if launch.torch_master is not None:
        store, address = open_torch_store(launch.torch_master, launch.started_rank, config.start_timeout_s)
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
        raise InternalError(f"rank {launch.rank} was told of no store")
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


def _join(start: _Start, secret: bytes) -> Connection:
    launch, config, rendezvous = start.launch, start.config, start.rendezvous
    rendezvous.enter()
    check_mpi(config, launch.mpi)
    check_interfaces(config.network_interfaces, config.told("network_interfaces"))
    check_log(config, launch.rank)
    identity = read_identity(config.host_id)
    infos = exchange_peer_info(rendezvous, PeerInfo.of(launch, config, identity, start.address, version()))
    start.forget_earlier()  # not before: until now a slower rank may have read keys of the last start
    gpu_warning = tell_difference(launch.rank, [(info.host, info.gpu) for info in infos])
    candidates = group_ranks([info.identity for info in infos]).members(launch.rank)
    segment_bytes = slot_bytes(config, machine_count(infos))
    arena, grouping = join_arena(
        rendezvous, candidates, secret, start.epoch, lambda count: arena_bytes(count, segment_bytes)
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
        gpu_warning,
        search_of(config, setup, machine_count(infos)),
    )


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
    """A job of one rank: memory and a wake-up descriptor of its own, no store, no socket."""
    check_interfaces(config.network_interfaces, config.told("network_interfaces"))
    grouping = Grouping((0,))
    segment_bytes = slot_bytes(config, 1)
    memory = create_memory(arena_bytes(1, segment_bytes))
    try:
        arena = Arena(memory, [create_wake()], [-1])
    except BaseException:
        close_all([memory])
        raise
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
