"""The tensor IR: types, graph, rows of ops, text and parser, verifier, rewrite rules."""
