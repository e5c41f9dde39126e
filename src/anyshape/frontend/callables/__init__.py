"""Callables: what `anyshape.compile` returns, and how a call of it finds its program."""
