"""Join: a rank that has no more data lets the others go on."""

from __future__ import annotations

from horo.torch.engine import runtime

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Lets the other ranks go on without this one, which has run out of data; blocks until all ranks have joined.

    Until then this rank takes part in the operations of the others, in all of its process sets, with values that change
    no result: zeros in sums, averages and Adasum, the neutral element in ``Min``, ``Max`` and ``Product``, no rows in
    ``allgather``. (1 + 0i in complex products makes NaN of the part beside an infinite or NaN one.) ``Average`` divides
    by the number of all ranks, joined ones included, as Horovod does. Operations that this rank has begun before go on;
    it can begin no others.

    A rank that joins early misses the steps of the others. Give all ranks the model and the optimizer of the rank that
    joined last before they go on training.

    Operations that need values of every rank raise ``MismatchError`` on the ranks that call them, which can go on:
    ``reducescatter``, ``alltoall``, ``add_process_set``, ``remove_process_set``, ``broadcast`` from a rank that has
    joined, and ``Min``, ``Max`` or ``Product`` with a ``prescale_factor``.

    An exception of a signal handler, such as Ctrl-C, ends the wait, but the rank has joined: another call waits on, and
    other operations are refused. This wait is reported if nothing moves, but never ends the job.

    Args:
        device: Accepted for Horovod's scripts; not used.

    Returns:
        The rank that joined last; the same on all ranks.

    Raises:
        UnsupportedError: The job has ``HORO_GPU_OPERATIONS=nccl``, and more than one rank.
        UsageError: A thread of this rank adds or removes a process set.
        GroupError: A rank is lost or has shut down.
        NotInitializedError: Before ``init()``.

    Example:
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(2 + hvd.rank()):  # ranks have different numbers of batches
            optimizer.zero_grad()
            model(torch.ones(1)).sum().backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    """
    del device
    return runtime.current().joining.run()
