"""A compiler of a subset of Python to LLVM, for the routines of the host."""
