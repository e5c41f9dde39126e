"""Kernel schedules and multi-versioning: interchange, tiling, split reductions, versions by size."""
