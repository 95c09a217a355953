"""Hosts: the assignment of ranks to hosts, and the shared memory of each host."""
