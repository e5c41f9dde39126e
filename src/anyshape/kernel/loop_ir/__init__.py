"""The loop IR, the program of one fused kernel: types, text and parser, aliasing, overrides."""
