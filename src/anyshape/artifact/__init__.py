"""Deployment: a compiled program as one file of text, weights and a native cache, and its loader, which needs numpy."""
