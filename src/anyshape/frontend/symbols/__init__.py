"""Sizes of a trace (SymInt, SymFloat) as sizes of ours, guards as facts, metadata of fx nodes."""
