"""Code generation: a loop program becomes LLVM IR."""
