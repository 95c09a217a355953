"""Differences between torches: versions, undocumented names, the profiler, torch.compile."""
