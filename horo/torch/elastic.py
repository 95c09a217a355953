"""A module of Horovod that is not there: its import is an error that names another way."""

from __future__ import annotations

from horo.torch.horovod_names.missing import sentence

__all__: list[str] = []

raise ImportError(sentence("horovod.torch", "elastic"), name=__name__)
