"""Hosts: which ranks share one, and the memory that they share."""
