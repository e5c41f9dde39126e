"""Symbolic sizes: their normal form, facts about them, and the prover (yes, no, or not known)."""
