"""Requests to the core from tensors, and the job that they are made in."""
