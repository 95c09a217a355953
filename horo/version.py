"""Versions: a module of its own, so that whoever needs one of them imports nothing else of horo."""

__all__ = ["HOROVOD_VERSION", "__version__"]

__version__ = "0.1.0"

HOROVOD_VERSION = "0.28.1"
"""The version of Horovod whose names these are, its last; scripts compare ``horovod.__version__``."""
