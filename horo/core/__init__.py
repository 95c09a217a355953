"""The native core as Python objects: nothing else of horo touches cffi."""
