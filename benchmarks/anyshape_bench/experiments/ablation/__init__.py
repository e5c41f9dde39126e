"""Ablation: what each technique of the compiler gives, left out one at a time."""
