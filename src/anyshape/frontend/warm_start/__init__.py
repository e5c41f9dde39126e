"""Warm start: captured programs in the disk cache, for the next process of the same script."""
