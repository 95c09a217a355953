"""The entry point ``torch.backends``: ``import torch`` calls ``register``, and "horo" is a backend in every program.

It imports nothing of horo and never raises: ``import torch`` works in a program that does not use horo, whatever is
wrong with it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> bool:
    """Makes "horo" a name for ``init_process_group``; whether torch has it now. Idempotent."""
    try:
        import torch.distributed as torch_distributed  # noqa: PLC0415 - of the torch that is being imported

        if not torch_distributed.is_available():
            return False
        backend: Any = torch_distributed.Backend
        if "HORO" not in backend._plugins:
            backend.register_backend("horo", _make_group, extended_api=True, devices=["cpu", "cuda"])
    except Exception:
        return False
    return True


def _make_group(options: Any, backend_options: object) -> Any:
    """Makes the group of ``init_process_group`` or ``new_group``; torch calls it on the members."""
    from horo.torch.distributed.group import HoroProcessGroup  # noqa: PLC0415 - not with `import torch`

    return HoroProcessGroup(options)
