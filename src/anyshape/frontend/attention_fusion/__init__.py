"""Attention fusion: attention written out by hand is matched and replaced by the fused operator."""
