"""Measures what this machine and network can do: ``horo bench``, or ``hororun --bench``."""
