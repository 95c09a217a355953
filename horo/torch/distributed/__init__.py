"""The backend "horo" of ``torch.distributed``: ``torch.distributed.init_process_group("horo")``.

torch finds the backend by itself if horo is installed. ``import horo.torch.distributed`` registers it, too, in a torch
before 2.5, and with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
"""

from horo.torch.distributed.group import HoroProcessGroup
from horo.torch_backend import register

__all__ = ["HoroProcessGroup"]

register()
