"""Native routines in the subset of Python: products, attention, threads, offset assignment, budget search."""
