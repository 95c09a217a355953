"""Installs Horovod's names and is then replaced in ``sys.modules``; see ``horo.horovod``."""

from __future__ import annotations

from horo.horovod import install

__all__: list[str] = []

install()
