"""The CPU backend: LLVM code for kernels, and a bytecode interpreter that runs a plan natively."""
