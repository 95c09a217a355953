"""Elastic jobs without torch: the memory of commits, the order of samples, the loop around a training function."""
