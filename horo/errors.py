"""The errors of horo, grouped by the extent of the damage. ``horo.torch`` has the same names.

HoroError(RuntimeError)
├── UsageError               the caller is wrong, nothing has changed (also a ValueError)
│   ├── NotInitializedError  (also a HorovodInternalError)
│   ├── MismatchError        ranks disagree about a tensor (also a HorovodInternalError)
│   └── UnsupportedError     (also a NotImplementedError)
├── ResourceError            this process lacks something
├── GroupError               a peer or a link is gone: rebuild the group (= HorovodInternalError)
│   ├── PeerLostError        (also a ConnectionError)
│   ├── StalledError
│   ├── DeadlockError        every rank waits for a request that another has not submitted
│   ├── TimeoutError         (also Python's TimeoutError)
│   └── AbortedError
└── InternalError            a bug in horo
"""

from __future__ import annotations

import builtins

__all__ = [
    "AbortedError",
    "DeadlockError",
    "GroupError",
    "HoroError",
    "HorovodInternalError",
    "InternalError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ResourceError",
    "StalledError",
    "TimeoutError",
    "UnsupportedError",
    "UsageError",
]


class HoroError(RuntimeError):
    """Base of every error that horo raises."""

    _is_told = False
    """Whether this rank has refused a call with it, which fails on the other ranks for that."""

    _is_released = False
    """Whether it is not the error of a request: its handle has been released."""


class UsageError(HoroError, ValueError):
    """The caller is wrong; nothing has changed, neither here nor on other ranks."""


class UnsupportedError(UsageError, NotImplementedError):
    """This dtype, device or combination is not offered."""


class ResourceError(HoroError):
    """This process lacks something: memory, a descriptor, a port."""


class GroupError(HoroError):
    """A peer or a link is gone. The group must be rebuilt: ``shutdown()``, then ``init()``."""


HorovodInternalError = GroupError
"""The name Horovod scripts catch."""


class NotInitializedError(UsageError, GroupError):
    """horo was used before ``init()`` or after ``shutdown()``."""


class MismatchError(UsageError, GroupError):
    """Ranks submitted different requests under one name. Every rank gets it; the job can go on."""


class PeerLostError(GroupError, ConnectionError):
    """A rank died or its host became unreachable."""


class StalledError(GroupError):
    """Within the time allowed, a rank did not submit a request for which the others wait."""


class DeadlockError(GroupError):
    """Every rank waits for a request that another has not submitted; the message names the ranks and the requests."""


class TimeoutError(GroupError, builtins.TimeoutError):
    """A peer did not answer within the time allowed."""


class AbortedError(GroupError):
    """The operation was given up because this or another rank shut horo down."""


class InternalError(HoroError):
    """A bug in horo. Please report it with the message and the output of ``hororun --check-build``."""


_CLASS_OF_STATUS: dict[str, type[HoroError]] = {
    "HORO_ERR_USAGE": UsageError,
    "HORO_ERR_NOT_INITIALIZED": NotInitializedError,
    "HORO_ERR_MISMATCH": MismatchError,
    "HORO_ERR_UNSUPPORTED": UnsupportedError,
    "HORO_ERR_DUPLICATE_NAME": UsageError,
    "HORO_ERR_HANDLE": UsageError,
    "HORO_ERR_RESOURCE": ResourceError,
    "HORO_ERR_FORKED": UsageError,
    "HORO_ERR_PEER_LOST": PeerLostError,
    "HORO_ERR_STALLED": StalledError,
    "HORO_ERR_TIMEOUT": TimeoutError,
    "HORO_ERR_ABORTED": AbortedError,
    "HORO_ERR_DEADLOCK": DeadlockError,
    "HORO_ERR_INTERNAL": InternalError,
}


def error_from_status(status_name: str, message: str, is_told: bool = False) -> HoroError:
    """The exception for a status of the native core, e.g. ``"HORO_ERR_PEER_LOST"``."""
    error = _CLASS_OF_STATUS.get(status_name, InternalError)(message)
    error._is_told = is_told
    error._is_released = status_name == "HORO_ERR_HANDLE"
    return error
