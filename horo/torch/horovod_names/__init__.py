"""Names of Horovod that horo has for its scripts only."""
