"""Two hosts or more, for tests that need a network between ranks. Skipped, with the reason, where none can be made."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from mpis import MPIS, Mpi, why_no_mpi
from namespaces import Cluster, make_cluster, why_not
from slurm import Slurm, make_slurm, why_no_slurm


@pytest.fixture(scope="session")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Cluster]]:
    """Gives a cluster of the number of hosts asked for; it lives as long as the session."""
    reason = why_not()
    if reason:
        pytest.skip(f"no cluster of network namespaces: {reason}")
    made: dict[int, Cluster] = {}
    with contextlib.ExitStack() as stack:

        def cluster_of(count: int) -> Cluster:
            if count not in made:
                made[count] = make_cluster(stack, tmp_path_factory.mktemp(f"cluster{count}"), count)
            return made[count]

        yield cluster_of


@pytest.fixture
def cluster(clusters: Callable[[int], Cluster]) -> Iterator[Cluster]:
    """Two hosts, with their cables in, and nothing left of the test before."""
    pair = clusters(2)
    yield pair
    for host in pair.hosts:
        pair.mend(host)
    pair.clean_up()


@pytest.fixture(scope="session")
def whole_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm on two hosts of its own: its daemons talk to each other while other tests count packets."""
    reason = why_not() or why_no_slurm()
    if reason:
        pytest.skip(f"no Slurm on network namespaces: {reason}")
    with contextlib.ExitStack() as stack:
        yield make_slurm(make_cluster(stack, tmp_path_factory.mktemp("slurm"), 2, "slurm"))


@pytest.fixture
def slurm(whole_slurm: Slurm) -> Iterator[Slurm]:
    """It, with nothing left of the test before."""
    yield whole_slurm
    whole_slurm.clean_up()


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI in turn."""
    found = MPIS[request.param]
    reason = why_no_mpi(found)
    if reason:
        pytest.skip(f"no {found.name}: {reason}")
    return found
