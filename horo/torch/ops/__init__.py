"""Collective operations on tensors."""
