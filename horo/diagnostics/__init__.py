"""The places at which the threads of a program stand, and whether all of them wait."""
