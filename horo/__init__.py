"""horo: distributed data-parallel training for PyTorch. Import ``horo.torch`` in a training script."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
