"""This folder is put before ``PYTHONPATH``, so that ``import horovod`` finds the module in it."""
