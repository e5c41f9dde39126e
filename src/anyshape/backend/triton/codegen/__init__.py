"""Triton code generation: a loop program becomes Triton text, with a version for each regime of sizes."""
