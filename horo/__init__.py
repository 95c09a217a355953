"""horo: distributed data-parallel training for PyTorch. Import ``horo.torch`` in a training script."""

from __future__ import annotations

from horo._absent import explain_imports, explain_part

__all__ = ["__version__"]

__version__ = "0.1.0"

explain_imports(explain_part)
