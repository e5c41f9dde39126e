"""Lowering: a fusion group of equations becomes a loop nest."""
