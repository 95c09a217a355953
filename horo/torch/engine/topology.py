"""The place of this process in its job: its rank, its host, and how many there are of each."""

from __future__ import annotations

from horo.torch.engine.runtime import find, place

__all__ = [
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "is_under_mpi",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def rank() -> int:
    """This process's number in the job, from 0. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        if hvd.rank() == 0:
            print("only one rank prints this")
    """
    return place().rank


def size() -> int:
    """The number of ranks in the job. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        learning_rate = 0.01 * hvd.size()
        print(f"{hvd.size()} ranks, learning rate {learning_rate}")
    """
    return place().size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        if hvd.local_rank() == 0:
            print("once per host, as to download data")
    """
    return place().local_rank


def local_size() -> int:
    """The number of ranks on this host. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        threads = max(1, (os.cpu_count() or 1) // hvd.local_size())
        torch.set_num_threads(threads)
    """
    return place().local_size


def cross_rank() -> int:
    """The number of this host among the hosts that have a rank of this ``local_rank``, from 0. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        host, place = hvd.cross_rank(), hvd.local_rank()
        print(f"host {host}, place {place} on it")
    """
    return place().cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank of this ``local_rank``. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        if hvd.cross_size() > 1:
            print("a network carries gradients")
    """
    return place().cross_size


def is_under_mpi() -> bool:
    """Whether this process is in a job whose rendezvous used MPI; False before ``init()``."""
    runtime = find()
    return runtime is not None and runtime.job.mpi is not None


def is_homogeneous() -> bool:
    """Whether every host has equally many ranks. Returns at once.

    Raises:
        NotInitializedError: Before ``init()``.

    Example:
        if not hvd.is_homogeneous():
            print("some hosts have fewer ranks")
    """
    return place().is_homogeneous
