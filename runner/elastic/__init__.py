"""Elastic jobs: ranks end and others go on, replacements join. ``driver`` decides, ``conduct`` carries it out."""
