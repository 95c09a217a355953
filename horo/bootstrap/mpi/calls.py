"""Finds addresses and handles of the MPI that mpi4py has loaded, for the core: horo itself is linked with no MPI."""

from __future__ import annotations

import ctypes
from typing import Any

from horo.core.setup import MPI_FUNCTIONS, MpiCalls
from horo.errors import ResourceError

__all__ = ["mpi_calls"]


def mpi_calls(comm: Any) -> MpiCalls:
    """The addresses and handles that the core needs to use ``comm``.

    Args:
        comm: an mpi4py ``Intracomm`` made for horo alone (a duplicate). From now on it returns errors instead of ending
            the process. It must not be freed before the context is destroyed.

    Raises:
        ResourceError: the MPI, or mpi4py, lacks something; the message names it and the library.
    """
    from mpi4py import MPI  # noqa: PLC0415 - initializes MPI, so only where there is one

    sizes = {name: MPI._sizeof(kind) for name, kind in _handle_kinds(MPI, comm).items()}
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ResourceError(f"{_version(MPI)} has handles of different sizes ({told} bytes); horo cannot use it")
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiCalls(
        handle_bytes=sizes["MPI_Comm"],
        status_bytes=MPI._sizeof(MPI.Status),
        size=comm.Get_size(),
        communicator=MPI._handleof(comm),
        byte=int(MPI._handleof(MPI.BYTE)),
        functions=[_address(MPI, name) for name in MPI_FUNCTIONS],
    )


def _handle_kinds(mpi: Any, comm: Any) -> dict[str, Any]:
    return {"MPI_Comm": comm, "MPI_Datatype": mpi.BYTE, "MPI_Request": mpi.REQUEST_NULL}


def _version(mpi: Any) -> str:
    return str(mpi.Get_library_version()).replace("\0", "").strip().splitlines()[0]


def _address(mpi: Any, name: str) -> int:
    """Address of a function in the library that mpi4py's own module is linked with."""
    try:
        function = getattr(ctypes.CDLL(mpi.__file__), name)
    except AttributeError:
        raise ResourceError(
            f"{_version(mpi)} lacks {name}, which horo needs; use an MPI of version 3.0 or newer"
        ) from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0
