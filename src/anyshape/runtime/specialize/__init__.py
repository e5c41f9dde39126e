"""Specialisation: a plan at given sizes, with its bytecode, offsets, and what it saves for a backward."""
