"""Settings: their table, their sources, and the variables of launchers."""
