"""LLVM IR by hand: builder, JIT, scalar and vector primitives, math functions, number formats."""
