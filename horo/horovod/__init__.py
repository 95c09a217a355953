"""Horovod's module names for horo, so that a script written for Horovod runs unchanged: ``python -m horo.horovod``.

``install()`` makes ``import horovod.torch`` give ``horo.torch`` in this process, the same module object, whether or not
Horovod is installed. ``hororun --horovod`` and ``python -m horo.horovod`` do that for a job.
"""

from __future__ import annotations

from horo.horovod.names import install, is_installed

__all__ = ["install", "is_installed"]
