"""Diagnostics: `explain()`, `memory()`, repro files."""
