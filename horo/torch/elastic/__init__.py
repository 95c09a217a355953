"""Elastic jobs: a training function goes on from its last commit when ranks are lost or come.

The names are those of ``horovod.torch.elastic``.
"""

from __future__ import annotations

from horo.elastic.state import ObjectState, State
from horo.torch.elastic.running import run
from horo.torch.elastic.sampler import ElasticSampler
from horo.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
