"""Attention fusion on graphs: what is written out is matched, forward and gradients, and becomes one op."""
