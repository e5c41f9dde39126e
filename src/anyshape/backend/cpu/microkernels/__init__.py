"""Microkernels in LLVM IR: matrix products, softmax rows, digests, random numbers."""
