"""Sharding of an optimizer: parameters and state once per host, and each rank steps its share of them."""
